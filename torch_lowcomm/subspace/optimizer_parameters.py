"""The parameters of SubspaceAdamW: their roles, which U they are in, their state, and their gradients in one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_lowcomm import _C
from torch_lowcomm._adam_groups import expect_in_range, expect_usable, inverse_of, loading
from torch_lowcomm._copies import NotCopied
from torch_lowcomm.diloco.parameters import local
from torch_lowcomm.subspace.parts import Parts
from torch_lowcomm.subspace.stage import StageModule
from torch_lowcomm.subspace.weights import ConstrainedWeight, constrained_weights, one_basis, shards, sum_slices

if TYPE_CHECKING:
    from torch_lowcomm.subspace.basis import Basis

Weights = Sequence[ConstrainedWeight | None]  # a trained parameter each; None: it is not constrained


class StepGradients:
    """Gradients that are projected once, for clipping and step, from backward to `zero_grad`."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops what is known of a step's gradients."""
        self._projected: tuple[list[torch.Tensor | None], list[Any]] | None = None
        self._clip: float | None = None
        self._norm: torch.Tensor | None = None

    def project(
        self, core: _C.SubspaceAdam, trained: Sequence[torch.Tensor], weights: Weights, names: Mapping[int, str]
    ) -> list[torch.Tensor | None]:
        """Returns this rank's gradients, whose coordinates the core has from here on; `names` are the parameters' by their
        id(). Collective where weights are sharded.
        """
        gradients = [None if p.grad is None else local(p.grad) for p in trained]
        for p, g in zip(trained, gradients, strict=True):
            if g is not None and g.layout != torch.strided:
                raise TypeError(f"SubspaceAdamW: {names[id(p)]}: expected a dense gradient, got one of {g.layout}")
        versions = [None if g is None else (g.data_ptr(), g._version) for g in gradients]
        if self._projected is None or versions != self._projected[1]:
            if self._clip is not None:
                raise ValueError(
                    "SubspaceAdamW: step: expected the gradients that clip_grad_norm saw, got others: clip after the last change "
                    "of gradients, or drop them by the optimizer's zero_grad"
                )
            sum_slices(weights, core.project(gradients))
            self._projected = gradients, versions  # kept alive: no other gradient can have its address
        return gradients

    def begin_clipping(self) -> None:
        """Forgets an earlier norm of the same gradients."""
        self._clip = self._norm = None

    def clip(self, norm: float, max_norm: float) -> torch.Tensor:
        """Sets the factor that makes the norm `max_norm` where it is larger; returns the norm, a float64 scalar."""
        self._clip = min(1.0, max_norm / (norm + 1e-6)) if norm == norm else norm
        self._norm = torch.tensor(norm, dtype=torch.float64)
        return self._norm

    def scale(self, grad_scale: torch.Tensor | None) -> float:
        """Returns the factor of this step's gradients, by clipping or by a gradient scaler's scale; both are a ValueError."""
        if grad_scale is None:
            return 1.0 if self._clip is None else self._clip
        if self._clip is not None:
            raise ValueError(
                "SubspaceAdamW: step: expected unscaled gradients in clip_grad_norm (call GradScaler.unscale_ before it), got "
                "scaled ones"
            )
        return inverse_of(grad_scale)

    def is_spoilt(self, found_inf: torch.Tensor | None) -> bool:
        """Whether a gradient scaler wants the step skipped, or would where it saw the other stages' gradients."""
        if found_inf is None:
            return False
        return bool(found_inf.item()) or (self._norm is not None and not bool(self._norm.isfinite()))


class SubspaceOptimizer(NotCopied, torch.optim.Optimizer):
    """What SubspaceAdamW knows of its parameters; its core, in C++, has the moments."""

    def __init__(
        self, params: nn.Module | Iterable[Any], defaults: dict[str, Any], variant: str, module: nn.Module | None
    ) -> None:
        self._variant = variant
        self._core = _C.SubspaceAdam()
        self._known: dict[int, str] = {}
        self._constrained: dict[int, ConstrainedWeight] = {}  # by id() of the parameter, frozen ones too
        self._trained: list[torch.Tensor] = []
        self._stages: list[StageModule] = []
        self._basis: Basis | None = None
        self._basis_checksum = 0  # of the basis that weights and moments are in
        self._gradients = StepGradients()
        if module is not None:
            self._learn(module)
        super().__init__([{"params": params}] if isinstance(params, nn.Module) else params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the parameters of a module, or named parameters of a module that the optimizer knows.

        Raises:
            TypeError: A parameter is no dense floating-point tensor.
            ValueError: A number is out of its range, or a parameter's role is not known. Nothing was added.
        """
        group = dict(param_group)
        if isinstance(group["params"], nn.Module):
            self._learn(group["params"])
            group["params"] = list(group["params"].named_parameters())
        super().add_param_group(group)
        added, number = self.param_groups[-1], len(self.param_groups) - 1
        try:
            expect_in_range("SubspaceAdamW", added)
            for p in added["params"]:
                if id(p) not in self._known:
                    raise ValueError(
                        f"SubspaceAdamW: expected a module, or parameters of module=, whose constrained weights are known, got a "
                        f"parameter of another, of shape {tuple(p.shape)}"
                    )
                if not p.is_floating_point():
                    raise TypeError(
                        f"SubspaceAdamW: {self._known[id(p)]}: expected a floating-point parameter, got {p.dtype}"
                    )
            trained = [p for p in added["params"] if p.requires_grad]
            for p in trained:
                shards(p)  # raises where a placement will not do
        except Exception:
            del self.param_groups[-1]
            raise
        for every in self.param_groups:  # the basis may have come with this one
            every.update(self._decoder())
        for p in trained:
            self._core.add(self._known[id(p)], local(p), group=number, **self._rule(p))
        self._trained += trained
        self._show_state()

    def _learn(self, module: nn.Module) -> None:
        """Takes down the names and roles of a module's parameters."""
        weights = constrained_weights(module)
        basis = one_basis([*self._constrained.values(), *weights]) or _basis_of(module)
        self._stages += [part for part in module.modules() if isinstance(part, StageModule)]
        self._known |= {id(p): name for name, p in module.named_parameters()}
        self._constrained |= {id(w.parameter): w for w in weights}
        if basis is not None and self._basis is None:
            self._basis, self._basis_checksum = basis, basis.checksum

    def _decoder(self) -> dict[str, int]:
        """What groups say of the decoder that a state belongs to: zeros where it is not constrained."""
        free_blocks = 0 if self._basis is None else self._basis.free_blocks
        return {"basis_checksum": self._basis_checksum, "free_blocks": free_blocks}

    def _rule(self, p: torch.Tensor) -> dict[str, Any]:
        weight = self._constrained.get(id(p))
        if weight is None:
            return {"rule": "plain"}
        rows = weight.role == "feed_forward_down" and self._variant == "rows"
        return {
            "rule": "rows" if rows else "projected",
            "axis": weight.axis,
            "vectors": weight.vectors,
            "width": weight.basis.width,
            "is_slice": weight.slices is not None,
            "is_coordinates": weight.is_coordinates,
        }

    def _weights(self) -> list[ConstrainedWeight | None]:
        """A trained parameter each."""
        return [self._constrained.get(id(p)) for p in self._trained]

    def _expect_usable(self) -> None:
        expect_usable("SubspaceAdamW", self.param_groups, self._trained, lambda p: self._known[id(p)])
        self._expect_own_basis()

    def _expect_own_basis(self) -> None:
        """Raises ValueError where a checkpoint has brought the basis other vectors than weights and moments are in."""
        if self._basis is not None and self._basis.checksum != self._basis_checksum:
            raise ValueError(
                f"SubspaceAdamW: expected U of checksum {self._basis_checksum:#010x}, which weights and moments are in, got a "
                f"basis of checksum {self._basis.checksum:#010x}: it is another seed's, of another checkpoint"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned; the run then goes on with the same bits.

        The state of a parameter is {"step", "exp_avg", "exp_avg_sq"} as AdamW's; of W_p2 "exp_avg" [k, hidden units] and
        "exp_avg_sq" [hidden units]; of types narrower than float32 also "rounding". Those of a sharded parameter are DTensors, so
        that `torch.distributed.checkpoint` gives them to any number of ranks. A group also has "basis_checksum" and "free_blocks"
        of the decoder that the state belongs to.

        Raises:
            ValueError: The state is of other parameters, or of a decoder with another basis or number of free blocks. Nothing has
                changed.
        """
        for group in state_dict["param_groups"]:
            for key, own in self._decoder().items():
                if (given := group.get(key, 0)) != own:  # torch's AdamW has none
                    raise ValueError(
                        f"SubspaceAdamW: {key}: expected the state of a decoder with {key}={own}, got one with {key}={given}, "
                        f"whose moments are others"
                    )
        names = [group.get("param_names") for group in self.param_groups]
        try:
            with loading(self, state_dict, self._trained) as states:
                for group, own in zip(self.param_groups, names, strict=True):
                    if own is not None:
                        group["param_names"] = own  # the state may be of a decoder that was cut elsewhere
                self._core.load([{key: local(torch.as_tensor(t)) for key, t in state.items()} for state in states])
        finally:
            self._gradients.forget()
            self._show_state()

    def _show_state(self) -> None:
        """Puts the core's state, which is its own memory, where torch's tools look for an optimizer's."""
        for p, weight, state in zip(self._trained, self._weights(), self._core.state(), strict=True):
            rows = weight is not None and self._rule(p)["rule"] == "rows"
            self.state[p] = {
                key: tensor if key == "step" else _as_parameter(p, tensor, rows and key != "rounding")
                for key, tensor in state.items()
            }


def _basis_of(module: nn.Module) -> Basis | None:
    """The basis of a constrained model or stage, which one of free blocks alone has too: its state says whose it is."""
    holders = (part for part in module.modules() if isinstance(getattr(part, "subspace_parts", None), Parts))
    return next((found for part in holders if (found := part._modules.get("subspace_basis")) is not None), None)


def _as_parameter(parameter: torch.Tensor, state: torch.Tensor, rows: bool) -> torch.Tensor:
    """A shard's state as the parameter's DTensor is; with `rows`, that of a moment of W_p2, [k, hidden units] or [hidden
    units].
    """
    if not isinstance(parameter, DTensor):
        return state
    mesh, placements = parameter.device_mesh, list(parameter.placements)
    if rows:
        units = Shard(state.ndim - 1)
        placements = [units if placement == Shard(1) else Replicate() for placement in placements]
    elif state.shape == parameter.to_local().shape:  # shards may be uneven
        return DTensor.from_local(state, mesh, placements, shape=parameter.shape, stride=parameter.stride())
    return DTensor.from_local(state, mesh, placements)
