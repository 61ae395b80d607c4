"""QSDP on FSDP2: quantized weights on the way out, quantized gradients on the way back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_lowcomm import _C
from torch_lowcomm.codec import codec
from torch_lowcomm.fsdp._torch_2_11 import ParameterGroup, ShardedParameter, parameter_groups
from torch_lowcomm.fsdp.comms import QuantizedAllGather, QuantizedReduceScatter, _LayoutComm
from torch_lowcomm.fsdp.fake import FakeComms, checked_ratio
from torch_lowcomm.fsdp.fsdp1 import State, hook
from torch_lowcomm.fsdp.hosts import HostComms, checked_hosts
from torch_lowcomm.fsdp.levels import CodedRun, Levels, learning_steps
from torch_lowcomm.fsdp.master import QuantizedMaster
from torch_lowcomm.fsdp.mixed import common_unit
from torch_lowcomm.fsdp.overlap import DeferredReductions, ForwardPrefetch, ModuleReductions
from torch_lowcomm.fsdp.replicas import Replicas
from torch_lowcomm.fsdp.state import QuantizedComms
from torch_lowcomm.groups import backend_of

__all__ = ["QuantizedAllGather", "QuantizedComms", "QuantizedReduceScatter", "State", "hook", "quantize"]

logger = logging.getLogger("torch_lowcomm")

MIN_ELEMENTS = 1024


def _is_coded(p: ShardedParameter, exact: Callable[[str, nn.Parameter], bool] | None) -> bool:
    """Not norms, biases and small tensors (not 2-D, or under 1024 elements), nor what the user names by any of its names."""
    small = p.parameter.ndim < 2 or p.parameter.numel() < MIN_ELEMENTS
    return not (small or p.has_extension or (exact is not None and any(exact(name, p.parameter) for name in p.names)))


def _runs(
    parameters: Iterable[tuple[ShardedParameter, bool]], codec: str, unit: torch.dtype | None = None
) -> list[CodedRun]:
    """Of elements of each parameter's own dtype; with a unit of elements of that, as which the bytes are read."""
    runs, first = [], 0
    for p, coded in parameters:
        shape = tuple(p.parameter.shape)
        count = p.shard_numel if unit is None else p.shard_numel * p.dtype.itemsize // unit.itemsize
        runs.append(CodedRun(p.names[0], shape, first, count, codec if coded else "none"))
        first += count
    return runs


@dataclass(frozen=True)
class _Choices:
    """What the caller of `quantize` chose: canonical codecs, and the rest checked."""

    weights: str
    gradients: str
    exact: Callable[[str, nn.Parameter], bool] | None
    master: str
    learn_at: tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    """What will travel how, for one group of parameters."""

    group: ParameterGroup
    coded: list[bool]  # by parameter
    gather: Levels
    reduce: Levels
    master: QuantizedMaster | None
    unit: torch.dtype | None  # of the gather's layout, where parameters have several dtypes

    @classmethod
    def of(cls, g: ParameterGroup, chosen: _Choices) -> _Plan:
        coded = [_is_coded(p, chosen.exact) for p in g.parameters]
        pairs = list(zip(g.parameters, coded, strict=True))
        trained = [pair for pair in pairs if pair[0].parameter.requires_grad]
        unit = common_unit(pairs)
        runs = _runs(pairs, chosen.weights, unit)
        master = None
        if chosen.master == "quantized":
            _expect_own_master(g)
            written = [(i, run.first, run.count) for i, run in enumerate(runs) if run.codec != "none"]
            master = QuantizedMaster(g.live_shards, written)
        reduced = Levels(_runs(trained, chosen.gradients), chosen.learn_at)
        return cls(g, coded, Levels(runs, chosen.learn_at), reduced, master, unit)

    def install(
        self, deferred: DeferredReductions | None, levels: HostComms | None, fake: int | None
    ) -> tuple[QuantizedAllGather, QuantizedReduceScatter]:
        """Nothing here can fail: ranks have agreed."""
        g = self.group
        other = FakeComms(g.group, fake) if fake is not None else levels
        carrier = other or backend_of(g.group)
        gather = QuantizedAllGather(
            g.group,
            self.gather,
            carrier.reserve_slots(len(self.gather.layout)),
            g.live_parameters,
            master=self.master,
            unit=self.unit,
            overlap=deferred is not None,
            carrier=other,
        )
        reduction = QuantizedReduceScatter(
            g.group,
            self.reduce,
            # Of each slice's segments every one draws by itself.
            carrier.reserve_slots(len(self.reduce.layout) * g.group.size()),
            g.trained,
            gather.weights,
            deferred=ModuleReductions(deferred, g) if deferred is not None else None,
            carrier=other,
        )
        g.module.set_custom_all_gather(gather)
        g.module.set_custom_reduce_scatter(reduction)
        return gather, reduction


def _expect_own_master(g: ParameterGroup) -> None:
    """The decoded value can only replace what was encoded, and only where no other rank keeps the same shard."""
    if g.has_replicas:
        raise ValueError(
            "fsdp.quantize: master='quantized': expected ranks that only shard, got replicas (HSDP), whose random draws, "
            "and with them their master copies, would differ"
        )
    for p in g.parameters:
        if p.dtype != p.parameter.dtype:
            raise ValueError(
                f"fsdp.quantize: master='quantized': expected shards gathered as they are, {p.parameter.dtype}, got "
                f"{p.names[0]} cast to {p.dtype} by a MixedPrecisionPolicy"
            )


def _choices(
    weights: str,
    gradients: str,
    exact: Callable[[str, nn.Parameter], bool] | None,
    master: str,
    learn_at: Sequence[int] | None,
) -> _Choices:
    if exact is not None and not callable(exact):
        raise TypeError(
            "fsdp.quantize: exact: expected a function of (name, parameter), for example `lambda name, _: name in names`, "
            f"got {type(exact).__name__}"
        )
    if master not in ("fp32", "quantized"):
        raise ValueError(f"fsdp.quantize: master: expected 'fp32' or 'quantized', got {master!r}")
    weights, gradients = codec(weights).spec, codec(gradients).spec
    if master == "quantized" and weights == "none":
        raise ValueError("fsdp.quantize: master='quantized': expected a codec for the weights, got 'none'")
    return _Choices(weights, gradients, exact, master, learning_steps(learn_at, (weights, gradients)))


def _plans(groups: list[ParameterGroup], chosen: _Choices) -> list[_Plan]:
    """Everything of `quantize` that can fail on this rank alone."""
    if any(g.uses_custom_comm(_LayoutComm) for g in groups):
        raise ValueError("fsdp.quantize: expected a model that is not quantized yet, got one that is")
    return [_Plan.of(g, chosen) for g in groups]


def _agree(plans: list[_Plan], said: str) -> None:
    """Every rank finds here what differs, before any of them has changed anything."""
    how = (said, _C.Layout([]))  # a name that differs is a difference too
    layouts: dict[str, list[tuple[str, _C.Layout]]] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    for number, plan in enumerate(plans):
        group = plan.group.group
        groups[group.group_name] = group
        layouts.setdefault(group.group_name, [how]).extend(
            [
                (f"weights of wrapped module {number}", plan.gather.layout),
                (f"gradients of wrapped module {number}", plan.reduce.layout),
            ]
        )
    for name, group in groups.items():
        backend_of(group).agree_layouts(layouts[name])


def _tell(groups: list[ParameterGroup], error: Exception) -> None:
    """A mistake of this rank's: its peers wait to agree, and get it as theirs."""
    process_groups = {g.group.group_name: g.group for g in groups}
    if not process_groups and dist.is_initialized():
        process_groups = {dist.group.WORLD.group_name: dist.group.WORLD}
    for group in process_groups.values():
        backend = _C.find_backend(group.group_name)
        if backend is not None:
            backend.agree_layouts([], error=f"{type(error).__name__}: {error}")


def quantize(
    model: nn.Module,
    *,
    weights: str = "minmax8:bucket=1024",
    gradients: str = "qsgd8:bucket=1024",
    exact: Callable[[str, nn.Parameter], bool] | None = None,
    master: str = "fp32",
    learn_at: Sequence[int] | None = None,
    overlap: bool = True,
    replicate: str | None = None,
    hosts: DeviceMesh | None = None,
    fake: int | None = None,
) -> QuantizedComms:
    """Quantize what FSDP2 moves for a model (QSDP, arXiv 2302.02390).

    Weights are encoded once, by the owner of the shard, and decoded by every rank, the owner too: all ranks compute with
    identical weights, the same in forward and backward, while the optimizer keeps the owner's full-precision shard.
    Gradients are encoded for the owner of each slice; its own contribution is not quantized. Buckets lie inside a
    parameter's shard. One message a wrapped module carries all of its parameters. Norms, biases and every parameter
    that is not at least 2-D or has under 1024 elements travel exact. Collective: all ranks agree on the layouts here.

    Call it after `fully_shard` and before the first step. With a MixedPrecisionPolicy FSDP2 hands over shards already
    cast, and those are what is coded. Parameters of several dtypes are coded where all that are coded have one. A flat
    buffer that the layout does not describe (coded parameters of several dtypes, a tensor subclass that gathers other
    tensors, a gradient that is missing, parameters frozen or thawed since) travels exact, is logged and counted.
    `with lc.exact():` holds for a gather or reduction issued inside it: keep a step's forward and backward on the same
    side of it, and with overlap whole passes of `model`, for gathers are issued ahead.

    Args:
        model: A module in which `fully_shard` wrapped something.
        weights: Codec of the all-gathers, "none" for exact.
        gradients: Codec of the reduce-scatters, "none" for exact.
        exact: Called with (fully qualified name, parameter), for a tied parameter once a name; True keeps that parameter
            out of both.
        master: What the optimizer steps: "fp32", the owner's full-precision shard, or "quantized", the shard as it was
            decoded (the paper's Eq. 2), for one more copy of the shard. Then an update under half a step is lost with a
            nearest codec, and `lattice<b>` is the one to take. The shard is replaced at the first gather after a step.
        learn_at: Optimizer steps at which `levels<b>` codecs learn their levels (the paper's Algorithm 2), in the first
            gather and reduction after that many; of tensors of more than 100,000 elements, the others' stay even.
            Default: the paper's 400, 1900 and 3800, of 4800.
        overlap: On the CPU, communicate while modules compute: a module's gather is issued when the module before it has
            its weights, and its reduction ends while the next one's backward runs, so that the memory of one gathered
            module and one module's gradients is taken beside what is computed with. Results are the same bits. What a
            reduction raises, a later part of backward() raises. Of HSDP, of gradients that are cast and where hooks
            wait for gradients, only gathers overlap.
        replicate: HSDP: codec of the all_reduce between replicas, "none" for exact; None leaves it to their group's policy.
            FSDP2 issues it itself, of flat buffers: norms and biases are coded too, buffers under the group's min_bytes
            not. It becomes the `all_reduce` of that group's policy, so other all_reduces of the group are coded too.
        hosts: A mesh, hosts x ranks of a host by names, of the ranks that shard (e.g. the one that was flattened for
            `fully_shard`): messages are exact inside a host and coded between hosts, where one coded copy a host crosses
            the link. Gradients are summed on their host first. What travels exact as a whole goes over the flat group.
        fake: For studies of speed only: move the first 1/fake of each message, exact, in place of codes. The model learns
            nothing that is right, and `weights` and `gradients` code nothing.

    Returns:
        A handle to checkpoint beside model and optimizer: with it, a resumed run draws what the run without a break
        would have, and has its levels.

    Raises:
        ValueError: No wrapped module, a codec that is wrong, a group that is not lowcomm's, several parameter groups in
            one module, a model that is quantized already, steps to learn at that are none, a mesh of other ranks,
            `replicate` without replicas, a `fake` that is no ratio; a quantized master where FSDP2 casts the shards or has
            replicas (HSDP), or with `fake`. Whatever is raised, the model is as it was.
        TypeError: `exact` is no function, `hosts` no mesh.
        DistBackendError: Ranks disagree on a layout (the first difference is named), or another rank raised.
    """
    groups: list[ParameterGroup] = []
    try:
        groups = list(parameter_groups(model))
        if not groups:
            raise ValueError(
                "fsdp.quantize: expected a model wrapped by fully_shard (FSDP2), got one without a wrapped module"
            )
        for g in groups:
            backend_of(g.group)
        replicas = Replicas(groups, replicate)
        mesh = checked_hosts(hosts, groups) if hosts is not None else None
        if fake is not None and checked_ratio(fake) and mesh is not None:
            raise ValueError("fsdp.quantize: fake: expected hosts=None, got a mesh")
        if fake is not None and master != "fp32":
            raise ValueError(f"fsdp.quantize: fake: expected master='fp32', got {master!r}")
        chosen = _choices(weights, gradients, exact, master, learn_at)
        plans = _plans(groups, chosen)
    except Exception as error:
        _tell(groups, error)
        Replicas(groups, None).tell(error)
        raise
    try:
        shape = "x".join(map(str, mesh.mesh.shape)) if mesh is not None else "flat"
        how = f"{'with' if overlap else 'without'} overlap, {replicas.said}, hosts {shape}, fake {fake}"
        _agree(plans, f"{how}, {master} master, levels learned at steps {list(chosen.learn_at)}")
    except Exception as error:
        replicas.tell(error)
        raise
    replicas.agree()
    levels = HostComms(mesh, backend_of(groups[0].group).options.timeout) if mesh is not None else None
    replicas.install()
    deferred = DeferredReductions() if overlap else None
    comms = [plan.install(deferred, levels, fake) for plan in plans]
    if fake is not None:
        logger.warning(
            "fsdp.quantize: fake=%d: only the first 1/%d of weights and gradients is sent. RESULTS ARE WRONG: this is for "
            "measurements of speed and for nothing else",
            fake,
            fake,
        )
    if overlap:
        pairs = zip(groups, comms, strict=True)
        early = [(g, gather.weights) for g, (gather, _) in pairs if g.device.type == "cpu" and not gather.master]
        ForwardPrefetch(model, early)  # a gather that writes the master must not be dropped, and is waited for at once
    coded = [p for plan in plans for p, is_coded in zip(plan.group.parameters, plan.coded, strict=True) if is_coded]
    logger.info(
        "fsdp.quantize: %d parameters (%d elements) travel as weights %s, gradients %s; %d travel exact",
        len(coded),
        sum(p.parameter.numel() for p in coded),
        chosen.weights,
        chosen.gradients,
        sum(len(plan.coded) for plan in plans) - len(coded),
    )
    return QuantizedComms([gather for gather, _ in comms], [reduction for _, reduction in comms], levels)
