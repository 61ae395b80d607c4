"""QSDP on FSDP2: all-gathers of quantized weights, reduce-scatters of quantized gradients."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_lowcomm import _C
from torch_lowcomm._hosts import AUTO, FLAT
from torch_lowcomm._log import logger
from torch_lowcomm.fsdp._torch_2_11 import ParameterGroup, parameter_groups
from torch_lowcomm.fsdp.agreement import Named, Replicas, agree, tell
from torch_lowcomm.fsdp.comms import QuantizedAllGather, QuantizedComms, QuantizedReduceScatter, _LayoutComm, install
from torch_lowcomm.fsdp.hosts import HostComms, checked_hosts
from torch_lowcomm.fsdp.overlap import DeferredReductions, ForwardPrefetch
from torch_lowcomm.fsdp.plan import Choices, Plan
from torch_lowcomm.groups import backend_of

__all__ = ["QuantizedAllGather", "QuantizedComms", "QuantizedReduceScatter", "quantize"]


def _asked(plans: list[Plan], replicas: Replicas, said: str) -> dict[str, list[Named]]:
    """Returns, for each group's name, what its ranks must have equal."""
    how = (said, _C.Layout([]))  # ranks compare names too
    asked: dict[str, list[Named]] = {}
    for number, plan in enumerate(plans):
        asked.setdefault(plan.group.group.group_name, [how]).extend(
            [
                (f"weights of wrapped module {number}", plan.gather.layout),
                (f"gradients of wrapped module {number}", plan.reduce.layout),
            ]
        )
    for name in replicas.names:
        asked.setdefault(name, []).append((replicas.said, _C.Layout([])))
    return asked


def _names(groups: list[ParameterGroup]) -> list[str]:
    """Names of the groups whose ranks wait for this one, in the order in which they agree."""
    names = [g.group.group_name for g in groups]
    if not names and dist.is_initialized():
        names = [dist.group.WORLD.group_name]
    return list(dict.fromkeys(names + Replicas(groups, None).names))


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
    hosts: DeviceMesh | str = AUTO,
) -> QuantizedComms:
    """Quantizes the weights and gradients that FSDP2 communicates for a model (QSDP, arXiv 2302.02390). Collective.

    Owners encode shards once, for all ranks that share them, and gradients for the owner of each slice. Replicas (HSDP) have
    identical weights only with a codec that does not round at random: a random codec draws separately for each replica. Levels
    too are learned separately from each replica's gradients, and each replica saves its levels.

    One message carries all parameters of a wrapped module. Buckets lie inside a parameter's shard. Norms, biases and every
    parameter with less than 2 dimensions or 1024 elements are sent exactly.

    Call it after `fully_shard` and before the first step; all ranks agree on the layouts here. With a MixedPrecisionPolicy
    FSDP2 passes shards that are already cast, and these are coded. Parameters of several dtypes are coded if all coded ones
    have the same dtype. A flat buffer that the layout does not describe is sent exactly, logged and counted: coded parameters
    of several dtypes, a tensor subclass that gathers other tensors, a missing gradient, parameters that were frozen or thawed
    since. `with lc.exact():` applies to a gather or reduction that is issued inside it. Keep a step's forward and backward on
    the same side of it; with overlap keep whole passes of `model` on one side, because gathers are issued ahead.

    Args:
        model: A module in which `fully_shard` wrapped something.
        weights: Codec of the all-gathers, "none" for exact.
        gradients: Codec of the reduce-scatters, "none" for exact.
        exact: Called with (fully qualified name, parameter), for a tied parameter once for each name; True keeps the
            parameter exact in both directions.
        master: The copy that the optimizer updates: "fp32", the owner's full-precision shard, or "quantized", the shard as it
            was decoded (the paper's Eq. 2), which takes one more copy of the shard. With "quantized" use `lattice<b>`: with
            a nearest codec an update below half a step is lost. The shard is replaced at the first gather after a step.
        learn_at: Optimizer steps at which `levels<b>` codecs learn their levels (the paper's Algorithm 2), in the first
            gather and reduction after them. Tensors of at most 100,000 elements keep even levels. Default: the paper's 400,
            1900 and 3800, of 4800.
        overlap: Whether to communicate while modules compute (also on CUDA, where no GPU has run this), which takes the memory
            of one more gathered module and of one module's gradients. Results are the same bits. A later part of backward()
            raises the error of a reduction. With HSDP, with gradients that are cast, and where hooks wait for gradients, only
            gathers overlap. Do not read `.grad` before backward() has ended.
        replicate: HSDP: codec of the all_reduce between replicas, "none" for exact; None leaves it to their group's policy.
            FSDP2 itself issues this all_reduce of flat buffers: norms and biases are coded too, buffers under the group's
            min_bytes are not. The codec becomes the `all_reduce` of the group's policy and codes its other all_reduces too.
        hosts: "auto": ranks of one network namespace of one machine share a host; "flat": each rank sends for itself; or a
            mesh [hosts, ranks of a host] of the ranks that shard (e.g. the one that was flattened for `fully_shard`). Where
            several hosts have several ranks, messages are exact inside a host and coded between hosts, and one coded copy for
            each host crosses the link. Gradients are first summed on their host; levels are learned before this sum, from
            each rank's gradients. Buffers that are sent exactly as a whole go over the flat group.

    Returns:
        A handle to save with model and optimizer: with it a resumed run has the draws and levels of a run without a break.

    Raises:
        ValueError: The model has no wrapped module, is quantized already, or has several parameter groups in one module; a
            codec, `learn_at` or `hosts` is wrong; a group is not of backend lowcomm; `replicate` was given without
            replicas; or a quantized master was asked for where FSDP2 casts the shards, or with replicas (HSDP).
            The model is as it was, whatever is raised.
        TypeError: `exact` is not a function, or `hosts` of another type.
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
        table = checked_hosts(hosts, groups)
        chosen = Choices(weights, gradients, exact, master, learn_at).checked()
        if any(g.uses_custom_comm(_LayoutComm) for g in groups):
            raise ValueError("fsdp.quantize: expected a model that is not quantized yet, got one that is")
        plans = [Plan.of(g, chosen) for g in groups]  # the last that can fail on this rank alone
    except Exception as error:
        tell(_names(groups), error)
        raise
    shape = "x".join(map(str, table.shape)) if table is not None else FLAT
    how = f"{'with' if overlap else 'without'} overlap, {replicas.said}, hosts {shape}"
    agree(_asked(plans, replicas, f"{how}, {master} master, levels learned at steps {list(chosen.learn_at or ())}"))
    levels = HostComms(table, backend_of(groups[0].group).options.timeout) if table is not None else None
    replicas.install()
    deferred = DeferredReductions() if overlap else None
    comms = [install(plan, deferred, levels) for plan in plans]
    if overlap:
        pairs = zip(groups, comms, strict=True)
        early = [(g, gather.weights) for g, (gather, _) in pairs if not gather.master]
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
