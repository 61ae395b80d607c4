"""Pipelines over slow links: torch's schedules with stages whose messages travel early, exact or coded.

stage = lc.pipeline.Stage(module, index, count, device, forward="gauss2", backward="gauss4", cache=lc.pipeline.Cache())
schedule = lc.pipeline.Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
for samples, x, y in lc.pipeline.batches(dataset, batch=32, seed=0):
    lc.pipeline.step(schedule, x, samples=samples, target=y)
"""

from torch_lowcomm.pipeline.batches import batches
from torch_lowcomm.pipeline.boundary_module import BoundaryModule
from torch_lowcomm.pipeline.cache import Cache
from torch_lowcomm.pipeline.edge import Edge
from torch_lowcomm.pipeline.schedule import Schedule1F1B
from torch_lowcomm.pipeline.stage import Stage
from torch_lowcomm.pipeline.step import evaluate, reset, step

__all__ = [
    "BoundaryModule",
    "Cache",
    "Edge",
    "Schedule1F1B",
    "Stage",
    "batches",
    "evaluate",
    "reset",
    "step",
]
