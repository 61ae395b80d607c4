"""Subspace-constrained pipelines: k numbers a token between stages in place of d, and a wire that loses nothing.

model = lc.subspace.constrain(decoder, rank=64, seed=0)
stage = lc.pipeline.Stage(lc.subspace.cut(model, index, count), index, count, device)
Schedule1F1B(stage, 8, loss_fn=loss).step(x, ids=x)          # ids on every rank

Protocol Models (arXiv 2506.01260): the residual stream of a decoder, less what every stage knows of a token, stays in a subspace
of k dimensions, so that its k coordinates are all that a boundary has to carry.
"""

from torch_lowcomm.subspace.check import check
from torch_lowcomm.subspace.compare import Finding
from torch_lowcomm.subspace.constrain import constrain
from torch_lowcomm.subspace.cut import cut
from torch_lowcomm.subspace.families import KeyValues
from torch_lowcomm.subspace.generate import generate
from torch_lowcomm.subspace.parts import Parts
from torch_lowcomm.subspace.reparam import reparam
from torch_lowcomm.subspace.stage import merge_states

__all__ = [
    "Finding",
    "KeyValues",
    "Parts",
    "check",
    "constrain",
    "cut",
    "generate",
    "merge_states",
    "reparam",
]
