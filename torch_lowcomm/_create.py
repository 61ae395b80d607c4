"""Makes a backend for c10d with its inner backends, and logs what the group compresses."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from torch_lowcomm import _C
from torch_lowcomm._copies import FIELDS
from torch_lowcomm._fresh_store import fresh_store
from torch_lowcomm._log import logger
from torch_lowcomm.codec import caution_of_policy


def make_gloo(store: Store, rank: int, size: int, of: _C.Options, connections: int | None) -> Any:
    """Makes a process group of gloo.

    Args:
        store: Rendezvous store, for this process group alone.
        rank: This process's rank in the group.
        size: Number of ranks.
        of: The group's options: time-out, name and global ranks.
        connections: Connections to every peer, each with a separate thread, for a process group that only sends and
            receives; a transfer's tag picks one. None for a process group that serves every op.

    Returns:
        A ProcessGroupGloo.
    """
    # The class is named in distributed_c10d too, where `torch_lowcomm run` puts lowcomm in its place: take the original.
    options = ProcessGroupGloo._Options()
    options._devices = _devices(connections)
    options._timeout = of._timeout
    # No worker thread takes part in sends and receives.
    options._threads = 2 * len(options._devices) if connections is None else 1
    return ProcessGroupGloo(store, rank, size, options)


def _devices(connections: int | None) -> list[Any]:
    """Makes gloo's devices, each with separate connections and a thread.

    torch reads GLOO_SOCKET_IFNAME where it makes gloo's options; options made here must read it too.

    Args:
        connections: Number of devices, spread over the interfaces; None for one device an interface.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    interfaces = names.split(",") if names else [None]
    chosen = [interfaces[i % len(interfaces)] for i in range(connections or len(interfaces))]
    return [
        ProcessGroupGloo.create_default_device() if name is None else ProcessGroupGloo.create_device(interface=name)
        for name in chosen
    ]


def make_nccl(store: Store, rank: int, size: int, of: _C.Options) -> Any:
    """Makes a process group of NCCL; the arguments are those of `make_gloo`.

    Returns:
        A ProcessGroupNCCL, or None where this torch or machine has none.
    """
    if not _has_nccl():
        return None
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = of._timeout
    # NCCL's flight recorder and time-outs name the group and its ranks by these.
    options.group_name, options.global_ranks_in_group = of.group_name, of.global_ranks_in_group
    return ProcessGroupNCCL(store, rank, size, options)


def _has_nccl() -> bool:
    """Whether this torch and machine have NCCL and a GPU. It does not wake the CUDA driver, which a later fork would miss."""
    return torch.distributed.is_nccl_available() and torch.cuda.device_count() > 0


def create_backend(dist_backend_opts: Any, pg_options: Any) -> Any:
    """Makes the backend of one group; torch.distributed calls it for `backend="lowcomm"`.

    The default group takes options that are not set from the environment, then from the defaults. A later group takes them
    from the default group as it is now, its policy included, if that is a group of lowcomm.

    Args:
        dist_backend_opts: c10d's DistributedBackendOptions: store, ranks, time-out, name.
        pg_options: An `Options`, or None for one with nothing set.

    Raises:
        TypeError: pg_options is neither an `Options` nor None.
        ValueError: An option is wrong.
        DistBackendError: Ranks differ in version or options, or one did not show up.
    """
    if pg_options is not None and not isinstance(pg_options, _C.Options):
        raise TypeError(f"pg_options: expected torch_lowcomm.Options or None, got {type(pg_options).__name__}")
    o = dist_backend_opts
    options = pg_options if pg_options is not None else _C.Options()
    backend = _C.create_backend(
        fresh_store(o.store, o.group_rank, o.group_size, options.timeout or o.timeout),
        o.group_rank,
        o.group_size,
        options,
        o.timeout,
        o.group_id,
        list(o.global_ranks_in_group) or list(range(o.group_size)),
        make_gloo,
        make_nccl,
        _C.find_backend(dist.group.WORLD.group_name) if dist.is_initialized() else None,
        _has_nccl(),
    )
    _announce(backend, o.group_rank, o.group_size)
    return backend


def without_nccl(options: _C.Options | None) -> _C.Options:
    """Options of a group that goes on when a peer is lost: NCCL, whose watchdog then ends the process, only if asked for."""
    options = options if options is not None else _C.Options()
    if options.nccl is not None or os.environ.get("LOWCOMM_NCCL"):
        return options
    return _C.Options(**{**{name: getattr(options, name) for name in FIELDS}, "nccl": False})


def _announce(backend: Any, rank: int, size: int) -> None:
    """Logs one INFO line for the group: what it compresses."""
    caution_of_policy(backend.policy)
    if backend.rank_without_nccl is not None:
        logger.warning(
            "lowcomm group %s: exact ops of CUDA tensors go through host memory, because rank %d has no NCCL or no GPU",
            backend.group_name,
            backend.rank_without_nccl,
        )
    if backend.policy:
        what = (
            f"compresses {backend.policy} for float32, float16 and bfloat16 contributions of at least "
            f"{backend.min_bytes} bytes; buckets run over each op's flat buffer, without a filter for norms and biases"
        )
    else:
        what = "compresses nothing (no policy): exact"
    logger.info("lowcomm group %s, rank %d of %d, kernels %s: %s", backend.group_name, rank, size, _C.kernels(), what)
