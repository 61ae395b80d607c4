"""Runs parts of a decoder on made-up input, and names what takes the residual stream out of the subspace."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torch_lowcomm.subspace.basis import Basis
from torch_lowcomm.subspace.families import is_transformers, run_blocks
from torch_lowcomm.subspace.parts import Parts

_TIME = 4  # positions of a probe


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that keeps a boundary from being exact.

    Attributes:
        module: The name of the module or parameter.
        reason: Why, and by how much where that is a number.
        half: Whether it is only that the residual stream is rounded to half precision.
    """

    module: str
    reason: str
    half: bool = False

    def __str__(self) -> str:
        return f"{self.module}: {self.reason}"


def distance(basis: Basis, x: torch.Tensor, *, weight: bool = False) -> float:
    """‖x − x·U·Uᵀ‖ / ‖x‖ over the last dimension, or over the first of a linear map's weight; 0 for zeros."""
    x = x.detach()
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    kept = basis.project_weight(x) if weight else basis.project(x)
    norm = float(x.norm())
    return float((x - kept).norm()) / norm if norm else 0.0


def tolerance(dtype: torch.dtype) -> float:
    """The distance that arithmetic in a type explains."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)


def leaving(parts: Parts, root: nn.Module, basis: Basis, number: int, block: nn.Module) -> list[Finding]:
    """Finds what a block adds to a residual stream outside the subspace, were its two projections in it.

    The block runs as in training, on a stream that is drawn from all dimensions, as anchors are: what it returns less what it is
    given has to be in the subspace, so that a block that scales its stream is found too. Projections are drawn in the subspace,
    and so is every trained parameter that is a gain or constant: one that is 1 or 0 today is another number after a step. All is
    as it was afterwards.
    """
    name = f"{parts.blocks}.{number}"
    projections = {m: path for path, _, m in parts.projections(root) if path.startswith(f"{name}.")}
    weight = next(iter(projections)).weight
    if weight.is_meta or type(weight.data) is not torch.Tensor:
        return []  # nothing to compute with, or a shard
    limit = tolerance(weight.dtype)
    with _drawn(basis, block, list(projections)), torch.no_grad():
        behind: list[Finding] = []
        with _watch(basis, name, block, projections, behind, limit):
            x = torch.randn(1, _TIME, basis.width, device=weight.device, dtype=weight.dtype)
            try:
                y = run_blocks(parts, root, x.clone(), only=[number])
            except Exception as error:
                reason = f"does not run as a stage calls it, on activations alone: {type(error).__name__}: {error}"
                return [Finding(name, reason)]
    if behind:
        return behind
    x, y = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (x, y))
    left = float(_outside(basis, y - x).norm() / y.norm())
    if left <= limit:
        return []
    return [Finding(name, _reason(left, _outside(basis, x), _outside(basis, y), limit))]


def _outside(basis: Basis, x: torch.Tensor) -> torch.Tensor:
    return x - basis.project(x)


def _reason(left: float, x: torch.Tensor, y: torch.Tensor, limit: float) -> str:
    """Why a share `left` of what a block adds is outside: x and y are the parts outside of what it is given and returns."""
    factors = (y * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
    if float((y - factors * x).norm()) > limit * float(y.norm()):
        return f"a share {left:.3g} of its output is outside the subspace: a gain, bias or dropout that is no module of its own"
    low, high = (float(bound) for bound in factors.aminmax())
    by = f"{low:.4g}" if high - low <= limit * abs(high) else f"{low:.4g} to {high:.4g}"
    return f"it multiplies the residual stream by {by} (a scale, or a norm behind the sum), and with it a token's fixed part"


@contextlib.contextmanager
def _drawn(basis: Basis, block: nn.Module, projections: list[nn.Module]) -> Iterator[None]:
    """Draws gains, constants and projections, sets training mode, and puts everything back."""
    training = {module: module.training for module in block.modules()}
    kept: dict[nn.Parameter, torch.Tensor] = {}
    device = projections[0].weight.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        try:
            block.train()
            for p in block.parameters():
                if p.requires_grad and p.numel() and (p.dim() <= 1 or bool((p == p.flatten()[0]).all())):
                    kept[p] = p.data
                    p.data = torch.rand_like(p) + 0.5
            for module in projections:
                kept.setdefault(module.weight, module.weight.data)
                drawn = torch.randn_like(module.weight) / module.weight.shape[1] ** 0.5
                module.weight.data = basis.project_weight(drawn.to(torch.promote_types(drawn.dtype, torch.float32))).to(
                    drawn
                )
                if module.bias is not None:  # a bias is a finding of its own
                    kept.setdefault(module.bias, module.bias.data)
                    module.bias.data = torch.zeros_like(module.bias)
            yield
        finally:
            for p, data in kept.items():
                p.data = data
            for module, mode in training.items():
                module.training = mode


@contextlib.contextmanager
def _watch(
    basis: Basis, prefix: str, block: nn.Module, projections: dict[nn.Module, str], found: list[Finding], limit: float
) -> Iterator[None]:
    """Adds to `found` the modules that are given a projection's output and return what is outside the subspace."""
    outputs: dict[int, tuple[str, torch.Tensor]] = {}  # by address; the tensor keeps it from being used again

    def after_projection(module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        outputs[output.data_ptr()] = projections[module], output

    def after_other(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.data_ptr() in outputs]
        if not given or not isinstance(output, torch.Tensor) or output.shape[-1] != basis.width:
            return
        behind, _ = outputs[given[0].data_ptr()]
        left = distance(basis, output)
        if left <= limit:
            outputs[output.data_ptr()] = behind, output
            return
        name = f"{prefix}.{next(path for path, m in block.named_modules() if m is module)}"
        p = getattr(module, "p", None)
        kind = f"dropout of {p}" if isinstance(p, float) else f"{type(module).__name__}, a norm or gain,"
        found.append(Finding(name, f"{kind} behind {behind} takes a share {left:.3g} out of the subspace"))

    with contextlib.ExitStack() as hooks:
        for module in block.modules():
            if module in projections:
                hooks.callback(module.register_forward_hook(after_projection).remove)
            elif not any(projection in set(module.modules()) for projection in projections):
                hooks.callback(module.register_forward_hook(after_other, with_kwargs=True).remove)
        yield


class _Reached(Exception):
    """The first block was about to run."""


def entry(parts: Parts, root: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(what the embedding gives, what the first block is given) for two rows of tokens, each [2, time, width].

    None where the model cannot be called with tokens alone.
    """
    embedding = root.get_submodule(parts.embedding)
    ids = tokens(parts, root)
    if ids is None:
        return None
    seen: list[torch.Tensor] = []

    def after_embedding(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        seen.append(output.clone())

    def before_block(_module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    with as_it_was(root, ids.device), contextlib.ExitStack() as stack:
        first = parts.blocks_of(root)[0][1]
        stack.callback(embedding.register_forward_hook(after_embedding).remove)
        stack.callback(first.register_forward_pre_hook(before_block, with_kwargs=True).remove)
        root.train()
        try:
            root(*arguments(root, ids))
        except _Reached:
            return (seen[0], seen[-1]) if len(seen) == 2 else None
        except Exception:
            return None
    return None


def tokens(parts: Parts, root: nn.Module) -> torch.Tensor | None:
    """Two rows of made-up tokens, [2, time]; None where the embedding's weight is not here, or only a shard of it."""
    weight: torch.Tensor = root.get_submodule(parts.embedding).weight
    if weight.is_meta or type(weight.data) is not torch.Tensor:
        return None
    return torch.arange(2 * _TIME, device=weight.device).view(2, _TIME) % weight.shape[0]


@contextlib.contextmanager
def as_it_was(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts each module's mode and the generators' states back afterwards; there are no gradients meanwhile."""
    training = {module: module.training for module in root.modules()}
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


def arguments(root: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Tokens for every argument that a model's forward needs."""
    if is_transformers(root):
        return [ids]
    takes = inspect.signature(root.forward).parameters.values()
    needed = [p for p in takes if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [ids] * max(len(needed), 1)
