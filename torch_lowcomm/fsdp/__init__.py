"""QSDP on FSDP2: quantized weights on the way out, quantized gradients on the way back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_lowcomm import _C
from torch_lowcomm.fsdp._torch_2_11 import ParameterGroup, parameter_groups
from torch_lowcomm.fsdp.agreement import Named, agree, tell
from torch_lowcomm.fsdp.comms import QuantizedAllGather, QuantizedReduceScatter, _LayoutComm
from torch_lowcomm.fsdp.fake import checked_ratio
from torch_lowcomm.fsdp.fsdp1 import State, hook
from torch_lowcomm.fsdp.hosts import HostComms, checked_hosts
from torch_lowcomm.fsdp.overlap import DeferredReductions, ForwardPrefetch
from torch_lowcomm.fsdp.plan import Choices, Plan
from torch_lowcomm.fsdp.replicas import Replicas
from torch_lowcomm.fsdp.state import QuantizedComms
from torch_lowcomm.groups import backend_of

__all__ = ["QuantizedAllGather", "QuantizedComms", "QuantizedReduceScatter", "State", "hook", "quantize"]

logger = logging.getLogger("torch_lowcomm")


def _plans(groups: list[ParameterGroup], chosen: Choices) -> list[Plan]:
    """Everything of `quantize` that can fail on this rank alone."""
    if any(g.uses_custom_comm(_LayoutComm) for g in groups):
        raise ValueError("fsdp.quantize: expected a model that is not quantized yet, got one that is")
    return [Plan.of(g, chosen) for g in groups]


def _asked(plans: list[Plan], replicas: Replicas, said: str) -> dict[str, list[Named]]:
    """What the ranks of each group must have alike."""
    how = (said, _C.Layout([]))  # a name that differs is a difference too
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
    """Of the groups whose ranks wait for this one, in the order in which they agree."""
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
    hosts: DeviceMesh | None = None,
    fake: int | None = None,
) -> QuantizedComms:
    """Quantize what FSDP2 moves for a model (QSDP, arXiv 2302.02390).

    Weights are encoded once, by the owner of the shard, and decoded by every rank, the owner too: all ranks that share
    the shards compute with identical weights, the same in forward and backward, while the optimizer keeps the owner's
    full-precision shard. (Replicas, in HSDP, do so with a codec that draws nothing: one that rounds at random draws for each
    replica apart; so are levels learned of each replica's gradients, to be saved by it.)
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
        overlap: Communicate while modules compute (on CUDA, where no GPU has run this, too): a module's gather is issued
            when the module before it has its weights, and its reduction ends while the next one's backward runs, so that
            the memory of one gathered module and one module's gradients is taken beside what is computed with. Results
            are the same bits. What a reduction raises, a later part of backward() raises. Of HSDP, of gradients that are
            cast and where hooks wait for gradients, only gathers overlap. Until backward() has ended, `.grad` is not to
            be read.
        replicate: HSDP: codec of the all_reduce between replicas, "none" for exact; None leaves it to their group's policy.
            FSDP2 issues it itself, of flat buffers: norms and biases are coded too, buffers under the group's min_bytes
            not. It becomes the `all_reduce` of that group's policy, so other all_reduces of the group are coded too.
        hosts: A mesh, hosts x ranks of a host by names, of the ranks that shard (e.g. the one that was flattened for
            `fully_shard`): messages are exact inside a host and coded between hosts, where one coded copy a host crosses
            the link. Gradients are summed on their host first; levels are learned of each rank's own, before that sum.
            What travels exact as a whole goes over the flat group.
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
        chosen = Choices.checked(weights, gradients, exact, master, learn_at)
        plans = _plans(groups, chosen)
    except Exception as error:
        tell(_names(groups), error)
        raise
    shape = "x".join(map(str, mesh.mesh.shape)) if mesh is not None else "flat"
    how = f"{'with' if overlap else 'without'} overlap, {replicas.said}, hosts {shape}, fake {fake}"
    agree(_asked(plans, replicas, f"{how}, {master} master, levels learned at steps {list(chosen.learn_at)}"))
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
