"""Outer loops: training that talks every so many steps, and goes on while it does.

opt = lc.DiLoCoX(torch.optim.AdamW(model.parameters()), sync_every=125, codec="sym4:bucket=128", model=model)
"""

from torch_lowcomm.outer.diloco import DiLoCoX

__all__ = ["DiLoCoX"]
