"""Outer loops: ranks train separately, average every so many steps, and go on training while they do.

opt = lc.DiLoCoX(torch.optim.AdamW(model.parameters()), sync_every=125, codec="sym4:bucket=128", model=model)
"""

from torch_lowcomm.diloco import presets
from torch_lowcomm.diloco.optimizer import DiLoCoX
from torch_lowcomm.diloco.options import DiLoCoXOptions

__all__ = ["DiLoCoX", "DiLoCoXOptions", "presets"]
