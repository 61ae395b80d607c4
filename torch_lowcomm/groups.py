"""Functions for living groups: policy, exact scopes, statistics."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.codec import caution_of_policy


def backend_of(group: dist.ProcessGroup | None = None) -> _C.LowcommBackend:
    """Returns the lowcomm backend behind a group.

    Args:
        group: A process group; None for the default group.

    Raises:
        TypeError: `group` is neither a process group nor None.
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
    # Looked up by name: under TORCH_DISTRIBUTED_DEBUG=DETAIL the group holds a wrapper of the backend.
    backend = _C.find_backend(group.group_name)
    if backend is None:
        raise ValueError(
            f"expected a group of backend lowcomm, got {group.group_name!r} of {dist.get_backend(group)!r}: make it by "
            'init_process_group("lowcomm"), or by new_group(ranks, backend="lowcomm")'
        )
    return backend


@overload
def set_policy(policy: str, /) -> None: ...


@overload
def set_policy(group: dist.ProcessGroup | None, policy: str) -> None: ...


def set_policy(group: Any, policy: str | None = None) -> None:
    """Changes what a living group compresses. Collective: every rank of the group calls it.

        lc.set_policy("all_gather=minmax8")             # the default group
        lc.set_policy(group, "all_gather=minmax8")

    Ops that were issued before keep the old policy. If it raises, nothing has changed.

    Args:
        group: The group; None, or left out, for the default group.
        policy: Text as for `Options(policy=…)`, e.g. "all_gather=minmax8; reduce_scatter=qsgd8"; "" is exact.

    Raises:
        TypeError: The arguments have other types or another order.
        ValueError: This rank's text is wrong; the wrong part is named.
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
    """Inside this block the ops that this thread issues are not compressed, in any group.

    It is for metrics, synchronised batch norms and the like. All ranks must enter it for the same ops; the op's description
    shows a rank that does not, and the error names it. It belongs to the thread: ops that autograd's device threads issue for
    a CUDA backward are outside, and a coroutine may not suspend inside. With FSDP2 put a step's forward and backward
    both inside or both outside, because each of them gathers the weights.
    """
    scope = _C.ExactScope()
    scope.enter()
    try:
        yield
    finally:
        scope.leave()


def stats(group: dist.ProcessGroup | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns counts and times of groups since they were made, or since `reset_stats`.

    Args:
        group: One group; None for every lowcomm group of this process.

    Returns:
        {group name: {op: figures}}. Messages of a pipeline are counted by boundary and direction: "send forward boundary 0",
        "recv backward boundary 0". The figures of an op are:

        * "calls"; "exact_calls", those of them in which nothing was coded.
        * "exact_because": {reason: tensors that were sent exactly although a policy or `fsdp.quantize` named their op}.
        * "without_units": sends of tensors with three dimensions that a policy coded as flat messages, so that a token of
          [batch, time, width] tells of later ones.
        * "staged_calls": calls with CUDA tensors that were coded on their device.
        * "unstaged_because": {reason: coded calls that copied the values of CUDA tensors instead}.
        * "device_to_host_bytes", "host_to_device_bytes": bytes that lowcomm's ops copied of CUDA tensors, which are codes in
          staged calls and values in others.
        * "raw_bytes": bytes that this rank would have sent without a codec.
        * "inner_bytes": the part of raw_bytes that the inner backend carried.
        * "wire_bytes": bytes that lowcomm sent, with frame headers; None if the inner backend served every call.
        * "ratio": (raw_bytes - inner_bytes) / wire_bytes; None where this rank sent no tensor, as in "recv".
        * "encode_s", "wait_s", "decode_s": seconds.
        * "wait_by_peer": {rank in the group: its part of wait_s, in seconds}.
        * "straggler": the rank that was waited for most, or None.
        * "relative_error": ||decoded - x|| / ||x|| over samples of what this rank encoded in host memory, some thousands of
          elements an op in another place each time. None if nothing was coded there, or only by codecs that take more
          than 16,384 elements at once. With a cache x is the change of an activation, and first visits are left out.
        * "samples": of a pipeline's activations with a cache {"seen": samples sent as changes, "first": sent for the first
          time, "overflow": sent by themselves for want of room, "forgotten": {reason as in `lc.pipeline.Cache.stats`: samples,
          counted when the two sides compare, on either}, "mean_value", "mean_change": means of abs(a) and of abs(a - m) over a
          part of each message's elements a that travelled as changes from m, or None}; else None.

    Raises:
        TypeError, ValueError: As `backend_of`.
    """
    return {backend.group_name: backend.stats() for backend in _living(group)}


def connections(group: dist.ProcessGroup | None = None) -> dict[str, list[dict[str, Any]]]:
    """Returns what is known of the connections of groups.

    Args:
        group: One group; None for every lowcomm group of this process.

    Returns:
        {group name: one entry a connection, by peer and lane; [] of a group that is over}.
        The fields of an entry are:

        * "peer": rank in the group; "lane": "control", "bulk 0", "bulk 1", ….
        * "connected": whether there is a connection at the moment; "times_made": how often there was one, which is 1 without
          cuts.
        * "sent_bytes", "received_bytes": of all of them, with what was sent again after cuts and the transport's headers, without
          TCP's and IP's.
        * "retransmitted": segments that the kernel sent again.
        * "round_trip_s", "least_round_trip_s": seconds, by the kernel, of the connection at the moment.
        * "congestion": its congestion control.
        * "cipher": its encryption; "" for none.
        * "path": "direct", or "relay host:port"; "" where there is no connection.

    Raises:
        TypeError, ValueError: As `backend_of`.
    """
    return {backend.group_name: _C.connections(backend) for backend in _living(group)}


def flight_record(group: dist.ProcessGroup | None = None) -> dict[str, dict[str, Any]]:
    """Returns the last ops and messages of groups, those under way included (`Options(flight_record=…)` says how many).

    At a time-out, at a fault and at `abort()` a group writes the same as JSON into a file, which the error names. The file is
    in the folder LOWCOMM_FLIGHT_DIR, or else in the system's folder for temporary files, and its name is
    lowcomm-flight-<group>-rank<global rank>-pid<pid>-epoch<epoch>.json. If it cannot be written, the error says so.

    Args:
        group: One group; None for every lowcomm group of this process.

    Returns:
        {group name: {"format" (1), "group", "size", "epoch", "rank" (in the group), "global_rank", "pid", "unix_time_s"
        (now), "because" (why it was written; "" here), "ops" (a list, oldest first)}}. The fields of an op are:

        * "op", "sequence", "state" ("queued", "under way", "done" or "failed"), "sent_bytes", "received_bytes".
        * "description": what ranks compare, {"tensors", "dtype", "elements a rank", "codec", …}; {} until the op starts.
        * "missing": peers whose frames have not all come, [{"rank", "received", "expected"}]. Frame 0 of a collective is its
          description.
        * "wait": what it waits for or failed on, {"rank", "frame", "doing", "since_s"}, or None.
        * "queued_s", "started_s", "ended_s": seconds from now, so negative; None if it has not happened.
        * "error": its text, or None.

        Ranks in an op are ranks of the group. An op that the inner backend serves is under way until its Work is asked.

    Raises:
        TypeError, ValueError: As `backend_of`.
    """
    return {backend.group_name: json.loads(backend.flight_record()) for backend in _living(group)}


def reset_stats() -> None:
    """Sets the counters of every lowcomm group of this process to zero, those that are gone included."""
    _C.forget_past_stats()
    for backend in _living(None):
        backend.reset_stats()


def _living(group: dist.ProcessGroup | None) -> list[_C.LowcommBackend]:
    """The backend of a group; of None those of every lowcomm group of this process."""
    if group is not None:
        return [backend_of(group)]
    return [backend for name in _C.backend_names() if (backend := _C.find_backend(name)) is not None]
