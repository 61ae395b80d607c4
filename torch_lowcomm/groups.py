"""What a program says to living groups: policy, exact scopes, statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.codec import caution_of_policy


def backend_of(group: dist.ProcessGroup | None = None) -> _C.LowcommBackend:
    """The lowcomm backend behind a group.

    Args:
        group: A process group; None for the default one.

    Raises:
        TypeError: Something else.
        ValueError: The group has no lowcomm backend, this rank is not in it, or there is no default group.
    """
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("expected a group that this rank is in, got GroupMember.NON_GROUP_MEMBER")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"expected a process group, or None for the default one, got {type(group).__name__}")
    if group is None:
        if not dist.is_initialized():
            raise ValueError('expected a process group: call init_process_group("lowcomm") first')
        group = dist.group.WORLD
    # Looked up by name: under TORCH_DISTRIBUTED_DEBUG=DETAIL what the group holds is a wrapper.
    backend = _C.find_backend(group.group_name)
    if backend is None:
        raise ValueError(
            f"expected a group of backend lowcomm, got {group.group_name!r} of {dist.get_backend(group)!r}"
        )
    return backend


@overload
def set_policy(policy: str, /) -> None: ...


@overload
def set_policy(group: dist.ProcessGroup | None, policy: str) -> None: ...


def set_policy(group: Any, policy: str | None = None) -> None:
    """Change what a living group compresses. Collective: every rank of the group calls it.

        lc.set_policy("all_gather=minmax8")             # the default group
        lc.set_policy(group, "all_gather=minmax8")

    Ops issued before keep the old policy. Nothing changes when it raises.

    Args:
        group: The group; None, or left out, for the default one.
        policy: Text as for `Options(policy=…)`, e.g. "all_gather=minmax8; reduce_scatter=qsgd8"; "" is exact.

    Raises:
        TypeError: Other arguments, or in another order.
        ValueError: This rank's text is wrong; the part is named.
        DistBackendError: Ranks differ (both texts are named), a peer's text was wrong, or a peer failed.
    """
    if isinstance(group, str) and policy is None:
        group, policy = None, group
    if isinstance(group, str) or not isinstance(policy, str):
        got = ", ".join(type(argument).__name__ for argument in (group, policy))
        raise TypeError(f"set_policy: expected (policy text) or (process group, policy text), got ({got})")
    backend = backend_of(group)
    backend.set_policy(policy)
    caution_of_policy(backend.policy)


@contextmanager
def exact() -> Iterator[None]:
    """Keep what this thread issues inside the block from being compressed, in every group.

    For metrics, synchronised batch norms and the like. All ranks must enter it for the same ops: one that does not is
    found out by the op's description and named. It is the thread's: what autograd's device threads issue for a CUDA
    backward is not inside, nor may a coroutine suspend in it. With FSDP2 put a step's forward and backward both inside
    or both outside, for each gathers the weights anew.
    """
    scope = _C.ExactScope()
    scope.enter()
    try:
        yield
    finally:
        scope.leave()


def stats(group: dist.ProcessGroup | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """What groups did since they were made, or since `reset_stats`.

    Args:
        group: One group; None for every lowcomm group of this process.

    Returns:
        {group name: {op: {"calls", "exact_calls" (of these, with nothing coded), "exact_because" (reason: tensors that
        went exact though a policy or `fsdp.quantize` named their op), "staged_calls" (with CUDA tensors that were coded on
        their device), "unstaged_because" (reason: coded calls that copied the values of CUDA tensors instead),
        "device_to_host_bytes" and "host_to_device_bytes" (what own ops copied of CUDA tensors: of staged ones the codes,
        else values), "raw_bytes" (what this rank would have sent without a codec),
        "inner_bytes" (the part of raw_bytes that the inner backend carried, uncounted), "wire_bytes" (what it sent itself,
        frame headers included; None where the inner backend served every call), "ratio" (of raw_bytes less inner_bytes to
        wire_bytes, or None), "encode_s", "wait_s", "decode_s", "wait_by_peer" (rank in the group: its seconds of wait_s),
        "straggler" (the rank that was waited for most, or None), "relative_error" (||decoded - x|| / ||x|| over samples
        of what this rank encoded in host memory: some thousands of elements an op, in another
        place each time; None where nothing was coded there, or only by codecs that take more than 16,384 elements at
        once)}}}
    """
    names = _C.backend_names() if group is None else [backend_of(group).group_name]
    backends = {name: _C.find_backend(name) for name in names}
    return {name: backend.stats() for name, backend in backends.items() if backend is not None}


def flight_record(group: dist.ProcessGroup | None = None) -> dict[str, dict[str, Any]]:
    """What groups are doing, and did last: their last ops and messages (`Options(flight_record=…)` of them).

    At a time-out, at a fault and at `abort()` a group writes the same as JSON into a file, which the error names: in the
    folder LOWCOMM_FLIGHT_DIR, else the system's for temporary files, by the name
    lowcomm-flight-<group>-rank<global rank>-pid<pid>-epoch<epoch>.json. A file that cannot be written changes no error but
    for saying so.

    Args:
        group: One group; None for every lowcomm group of this process.

    Returns:
        {group name: {"format" (1), "group", "size", "epoch", "rank" (in the group), "global_rank", "pid", "unix_time_s"
        (now), "because" (why it was written; "" here), "ops": [oldest first, {"op", "sequence", "state" ("queued",
        "under way", "done" or "failed"), "description" (what ranks compare: {"tensors", "dtype", "elements a rank",
        "codec", …}; {} until the op starts), "missing" (peers of which not all frames have come: [{"rank", "received",
        "expected"}]; frame 0 of a collective is its description), "wait" (what it waits for, or failed on: {"rank",
        "frame", "doing", "since_s"}, or None), "sent_bytes", "received_bytes", "queued_s", "started_s", "ended_s"
        (seconds from now, so negative; None for what has not come), "error" (or None)}]}}

        Ranks in an op are the group's. An op that the inner backend serves is under way until somebody asks its Work.
    """
    names = _C.backend_names() if group is None else [backend_of(group).group_name]
    backends = {name: _C.find_backend(name) for name in names}
    return {name: json.loads(backend.flight_record()) for name, backend in backends.items() if backend is not None}


def reset_stats() -> None:
    """Set the counters of every lowcomm group of this process to zero."""
    for name in _C.backend_names():
        backend = _C.find_backend(name)
        if backend is not None:
            backend.reset_stats()
