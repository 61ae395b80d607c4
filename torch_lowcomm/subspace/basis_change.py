"""Weights and momenta that go from one U to another."""

from collections.abc import Sequence

import torch

from torch_lowcomm.diloco.parameters import local
from torch_lowcomm.subspace.weights import ConstrainedWeight, sum_tensors

_TOLERANCE = 1e-6  # of vectors that somebody else has made, and may have sent as float32


def checked_vectors(own: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both vectors in float64, on the device of the optimizer's own, which `old` has to be."""
    old, new = (vectors.detach().to(own) for vectors in (old, new))
    for name, vectors in (("old_vectors", old), ("new_vectors", new)):
        if vectors.shape != own.shape:
            raise ValueError(
                f"SubspaceAdamW: change_basis: {name}: expected shape {tuple(own.shape)}, got {tuple(vectors.shape)}"
            )
    if not (apart := (old - own).abs().max().item()) <= _TOLERANCE:
        raise ValueError(
            f"SubspaceAdamW: change_basis: old_vectors: expected the U that the weights are in, got one that differs by "
            f"{apart:.1e}"
        )
    identity = torch.eye(own.shape[0], dtype=own.dtype, device=own.device)
    if not (off := (new @ new.T - identity).abs().max().item()) <= _TOLERANCE:
        raise ValueError(
            f"SubspaceAdamW: change_basis: new_vectors: expected orthonormal rows, got products of rows that differ by {off:.1e} "
            f"from 0 and 1"
        )
    return old, new


def change_basis(
    weights: Sequence[ConstrainedWeight | None],
    states: Sequence[dict[str, torch.Tensor]],
    old: torch.Tensor,
    new: torch.Tensor,
) -> None:
    """Projects weights and momenta onto the new S, in float64; nothing is written before all sums are there.

    Args:
        weights: A parameter each; None: it is not constrained.
        states: A parameter's each, "exp_avg" and maybe "rounding": tensors that are written to. Empty: it is frozen.
        old: Uᵀ [k, d].
        new: U'ᵀ [k, d].
    """
    turn = new @ old.T  # U'ᵀU, [k, k]
    # Of each weight its own and, where it is trained, its momentum's.
    moved: list[tuple[ConstrainedWeight, bool, torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]] = []
    for weight, state in zip(weights, states, strict=True):
        if weight is None:
            continue
        part = local(weight.parameter).double()
        if "rounding" in state:
            part = part + state["rounding"]
        tensors: list[tuple[torch.Tensor, bool, torch.Tensor | None]] = [(part, weight.is_coordinates, None)]
        if "exp_avg" in state:
            rows = state["exp_avg_sq"].ndim < state["exp_avg"].ndim
            tensors.append((state["exp_avg"].double(), rows, state["exp_avg"]))
        for tensor, already, momentum in tensors:
            if not already:
                turned = weight.coordinates(tensor, new)
            elif weight.axis == 0:
                turned = turn @ tensor
            else:
                turned = tensor @ turn.T
            moved.append((weight, already, turned, state, momentum))
    sum_tensors((c, weight.slices) for weight, already, c, _, _ in moved if not already)
    for weight, already, c, state, momentum in moved:
        value = c if already else weight.expand(c, new)
        if momentum is not None:
            momentum.copy_(value)
            continue
        parameter = local(weight.parameter)
        parameter.copy_(value)
        if "rounding" in state:
            state["rounding"].copy_(value - parameter.double())
