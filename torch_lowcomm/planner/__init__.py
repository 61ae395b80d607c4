"""A plan: which method suits a model and a link, by seconds, bytes, memory and loss.

print(lc.plan(model, batch, link=lc.planner.Link.of("100mbit", sites=4)))
"""

from torch_lowcomm.planner.link import Link
from torch_lowcomm.planner.measure import codings
from torch_lowcomm.planner.plan import Plan, plan
from torch_lowcomm.planner.training import Training

__all__ = ["Link", "Plan", "Training", "codings", "plan"]
