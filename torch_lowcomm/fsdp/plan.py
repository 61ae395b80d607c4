"""Plans a wrapped module: which of its parameters are coded, and in which layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from torch_lowcomm.codec import codec
from torch_lowcomm.fsdp._torch_2_11 import ParameterGroup, ShardedParameter
from torch_lowcomm.fsdp.levels import Levels, ParameterRun, learning_steps
from torch_lowcomm.fsdp.master import QuantizedMaster

MIN_ELEMENTS = 1024


def is_coded(p: ShardedParameter, exact: Callable[[str, nn.Parameter], bool] | None) -> bool:
    """Whether a parameter is coded: not if it has less than 2 dimensions or 1024 elements, nor if `exact` names it."""
    small = p.parameter.ndim < 2 or p.parameter.numel() < MIN_ELEMENTS
    return not (small or p.has_extension or (exact is not None and any(exact(name, p.parameter) for name in p.names)))


def runs_of(
    parameters: Iterable[tuple[ShardedParameter, bool]], codec: str, unit: torch.dtype | None = None
) -> list[ParameterRun]:
    """Returns the runs of (parameter, whether it is coded) in a flat buffer; those that are not coded have "none". Elements
    are counted in the dtype `unit`; None: in each parameter's own.
    """
    runs, first = [], 0
    for p, coded in parameters:
        shape = tuple(p.parameter.shape)
        count = p.shard_numel if unit is None else p.shard_numel * p.gathered_dtype.itemsize // unit.itemsize
        runs.append(ParameterRun(p.names[0], shape, first, count, codec if coded else "none"))
        first += count
    return runs


def common_unit(parameters: Sequence[tuple[ShardedParameter, bool]]) -> torch.dtype | None:
    """Returns the dtype as which one flat buffer can be coded that FSDP2 gathers as bytes: parameters have several dtypes.

    It is the dtype of all coded parameters, of which pairs tell. The bytes of the others are sent as `none` elements of this
    dtype. None if all parameters have one dtype already, none is coded, coded ones have several dtypes, a parameter decides
    itself what is gathered, or a parameter's bytes are not whole elements.
    """
    if len({p.gathered_dtype for p, _ in parameters}) < 2 or any(p.has_extension for p, _ in parameters):
        return None
    coded = {p.gathered_dtype for p, is_coded in parameters if is_coded}
    if len(coded) != 1:
        return None
    (unit,) = coded
    whole = all(p.shard_numel * p.gathered_dtype.itemsize % unit.itemsize == 0 for p, _ in parameters)
    return unit if whole else None


@dataclass(frozen=True)
class Choices:
    """The choices of the caller of `quantize`, under its names."""

    weights: str
    gradients: str
    exact: Callable[[str, nn.Parameter], bool] | None
    master: str
    learn_at: Sequence[int] | None

    def checked(self) -> Choices:
        """Returns the choices with canonical codecs and the steps at which levels are learned."""
        if self.exact is not None and not callable(self.exact):
            raise TypeError(
                "fsdp.quantize: exact: expected a function of (name, parameter), for example "
                f"`lambda name, _: name in names`, got {type(self.exact).__name__}"
            )
        if self.master not in ("fp32", "quantized"):
            raise ValueError(f"fsdp.quantize: master: expected 'fp32' or 'quantized', got {self.master!r}")
        weights, gradients = codec(self.weights).spec, codec(self.gradients).spec
        if self.master == "quantized" and weights == "none":
            raise ValueError("fsdp.quantize: master='quantized': expected a codec for the weights, got 'none'")
        steps = learning_steps(self.learn_at, (weights, gradients))
        return replace(self, weights=weights, gradients=gradients, learn_at=steps)


@dataclass(frozen=True)
class Plan:
    """How one group of parameters is sent."""

    group: ParameterGroup
    coded: list[bool]  # by parameter
    gather: Levels
    reduce: Levels
    master: QuantizedMaster | None
    unit: torch.dtype | None  # of the gather's layout, where parameters have several dtypes

    @classmethod
    def of(cls, g: ParameterGroup, chosen: Choices) -> Plan:
        """Plans one group; raises ValueError where its master cannot be quantized."""
        coded = [is_coded(p, chosen.exact) for p in g.parameters]
        pairs = list(zip(g.parameters, coded, strict=True))
        trained = [pairs[i] for i in g.reduced_order() if g.parameters[i].parameter.requires_grad]
        unit = common_unit(pairs)
        runs = runs_of(pairs, chosen.weights, unit)
        master = None
        if chosen.master == "quantized":
            _expect_own_master(g)
            written = [(i, run.first, run.count) for i, run in enumerate(runs) if run.codec != "none"]
            master = QuantizedMaster(g.live_shards, written)
        reduced = Levels(runs_of(trained, chosen.gradients), chosen.learn_at or ())
        return cls(g, coded, Levels(runs, chosen.learn_at or ()), reduced, master, unit)


def _expect_own_master(g: ParameterGroup) -> None:
    """Raises ValueError unless the shards are gathered as they are and no other rank has the same shard."""
    if g.has_replicas:
        raise ValueError(
            "fsdp.quantize: master='quantized': expected ranks that only shard, got replicas (HSDP), whose random draws, "
            "and with them their master copies, would differ"
        )
    for p in g.parameters:
        if p.gathered_dtype != p.parameter.dtype:
            raise ValueError(
                f"fsdp.quantize: master='quantized': expected shards gathered as they are, {p.parameter.dtype}, got "
                f"{p.names[0]} cast to {p.gathered_dtype} by a MixedPrecisionPolicy"
            )
