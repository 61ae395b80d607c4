"""QSDP on FSDP2: quantized weights on the way out, quantized gradients on the way back."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from torch_lowcomm import _C
from torch_lowcomm.fsdp._torch_2_11 import ParameterGroup, ShardedParameter, parameter_groups
from torch_lowcomm.fsdp.comms import QuantizedAllGather, QuantizedReduceScatter, _LayoutComm
from torch_lowcomm.fsdp.state import QuantizedComms
from torch_lowcomm.groups import backend_of

__all__ = ["QuantizedAllGather", "QuantizedComms", "QuantizedReduceScatter", "quantize"]

logger = logging.getLogger("torch_lowcomm")

MIN_ELEMENTS = 1024
_GRADIENT_SLOTS = 2**15  # weights draw from the slots below, gradients from those above


def _travels_exact(p: ShardedParameter, exact: Callable[[str, nn.Parameter], bool] | None) -> bool:
    """Norms, biases and small tensors: anything not at least 2-D or under 1024 elements, and what the user names."""
    small = p.parameter.ndim < 2 or p.parameter.numel() < MIN_ELEMENTS
    return small or p.has_extension or (exact is not None and bool(exact(p.name, p.parameter)))


def _layout(parameters: list[ShardedParameter], coded: set[str], codec: str) -> _C.Layout:
    segments, first = [], 0
    for p in parameters:
        segments.append((first, p.shard_numel, codec if p.name in coded else "none"))
        first += p.shard_numel
    return _C.Layout(segments)


def _install(
    g: ParameterGroup, coded: set[str], weights: str, gradients: str, number: int
) -> tuple[QuantizedAllGather, QuantizedReduceScatter]:
    gather = _layout(g.parameters, coded, weights)
    reduce = _layout([p for p in g.parameters if p.parameter.requires_grad], coded, gradients)
    backend = backend_of(g.group)
    backend.agree_layout(f"weights of group {number}", gather)
    backend.agree_layout(f"gradients of group {number}", reduce)
    # A tensor's number within the step: apart by more segments than a group has, wrapping where there are that many.
    slot = (number * 64) % _GRADIENT_SLOTS
    comms = (
        QuantizedAllGather(g.group, gather, slot, g.live_parameters),
        QuantizedReduceScatter(g.group, reduce, _GRADIENT_SLOTS + slot),
    )
    g.module.set_custom_all_gather(comms[0])
    g.module.set_custom_reduce_scatter(comms[1])
    return comms


def quantize(
    model: nn.Module,
    *,
    weights: str = "minmax8:bucket=1024",
    gradients: str = "qsgd8:bucket=1024",
    exact: Callable[[str, nn.Parameter], bool] | None = None,
) -> QuantizedComms:
    """Quantize what FSDP2 moves for a model (QSDP, arXiv 2302.02390).

    Weights are encoded once, by the owner of the shard, and decoded by every rank, the owner too: all ranks compute with
    identical weights, the same in forward and backward, while the optimizer keeps the owner's full-precision shard.
    Gradients are encoded for the owner of each slice; its own contribution is not quantized. Buckets lie inside a
    parameter's shard. One message a wrapped module carries all of its parameters. Norms, biases and every parameter
    that is not at least 2-D or has under 1024 elements travel exact. Collective: all ranks agree on the layouts here.

    Call it after `fully_shard` and before the first step. With a MixedPrecisionPolicy FSDP2 hands over shards already
    cast, and those are what is coded. A flat buffer that the layout does not describe (parameters of several dtypes,
    a gradient that is missing) travels exact, is logged and counted. HSDP's all_reduce between replicas is not touched.

    Args:
        model: A module in which `fully_shard` wrapped something.
        weights: Codec of the all-gathers, "none" for exact.
        gradients: Codec of the reduce-scatters, "none" for exact.
        exact: Called with (fully qualified name, parameter); True keeps that parameter out of both.

    Returns:
        A handle to checkpoint beside model and optimizer: with it, a resumed run draws what the run without a break
        would have.

    Raises:
        ValueError: No wrapped module, a codec that is wrong, a group that is not lowcomm's, several parameter groups in
            one module, or a model that is quantized already.
        DistBackendError: Ranks disagree on a layout; the first difference is named.
    """
    weights, gradients = _C.Codec(weights).spec, _C.Codec(gradients).spec
    groups = list(parameter_groups(model))
    if not groups:
        raise ValueError(
            "fsdp.quantize: expected a model wrapped by fully_shard (FSDP2), got one without a wrapped module"
        )
    if any(g.uses_custom_comm(_LayoutComm) for g in groups):
        raise ValueError("fsdp.quantize: expected a model that is not quantized yet, got one that is")
    counted = kept = elements = 0
    comms = []
    for number, g in enumerate(groups):
        coded = {p.name for p in g.parameters if not _travels_exact(p, exact)}
        comms.append(_install(g, coded, weights, gradients, number))
        counted += len(coded)
        kept += len(g.parameters) - len(coded)
        elements += sum(p.parameter.numel() for p in g.parameters if p.name in coded)
    logger.info(
        "fsdp.quantize: %d parameters (%d elements) travel as weights %s, gradients %s; %d travel exact",
        counted,
        elements,
        weights,
        gradients,
        kept,
    )
    return QuantizedComms([gather for gather, _ in comms], [reduction for _, reduction in comms])
