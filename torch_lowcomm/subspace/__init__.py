"""Subspace-constrained pipelines: k numbers a token between stages in place of d, and a wire that loses nothing.

Protocol Models (arXiv 2506.01260): the residual stream of a decoder, less what every stage knows of a token, is kept in a
subspace of k dimensions, so that its k coordinates are all that a boundary has to carry.
"""

from torch_lowcomm.subspace.anchor import Anchor
from torch_lowcomm.subspace.basis import Basis
from torch_lowcomm.subspace.boundary import Decode, Encode

__all__ = ["Anchor", "Basis", "Decode", "Encode"]
