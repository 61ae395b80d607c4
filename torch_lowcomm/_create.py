"""Makes a backend for c10d, with NCCL where that is asked for, and logs what the group compresses."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torch_lowcomm import _C
from torch_lowcomm._copies import FIELDS
from torch_lowcomm._fresh_store import fresh_store
from torch_lowcomm._log import logger
from torch_lowcomm.codec import caution_of_policy
from torch_lowcomm.live import metrics
from torch_lowcomm.summary import note_rank


def make_nccl(store: Store, rank: int, size: int, of: _C.Options) -> Any:
    """Makes a ProcessGroupNCCL with a group's time-out, name and global ranks; None where this torch or machine has none. The
    store is for this process group alone.
    """
    # Does not wake the CUDA driver, which a later fork would miss.
    if not (torch.distributed.is_nccl_available() and torch.cuda.device_count() > 0):
        return None
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = of._timeout
    # NCCL's flight recorder and time-outs name the group and its ranks by these.
    options.group_name, options.global_ranks_in_group = of.group_name, of.global_ranks_in_group
    return ProcessGroupNCCL(store, rank, size, options)


def create_backend(dist_backend_opts: Any, pg_options: Any) -> Any:
    """Makes the backend of one group; torch.distributed calls it for `backend="lowcomm"`.

    The default group takes options that are not set from the environment, then from the defaults. A later group takes them
    from the default group as it is now, its policy included, if that is a group of lowcomm. `dist_backend_opts` are c10d's
    DistributedBackendOptions; None as `pg_options` is an `Options` with nothing set. Ranks that differ in version or options,
    or of which one does not show up, are a DistBackendError.
    """
    if pg_options is not None and not isinstance(pg_options, _C.Options):
        raise TypeError(f"pg_options: expected torch_lowcomm.Options or None, got {type(pg_options).__name__}")
    o = dist_backend_opts
    global_ranks = list(o.global_ranks_in_group) or list(range(o.group_size))
    metrics.begin(os.environ, global_ranks[o.group_rank])
    options = pg_options if pg_options is not None else _C.Options()
    backend = _C.create_backend(
        fresh_store(o.store, o.group_rank, o.group_size, options.timeout or o.timeout),
        o.group_rank,
        o.group_size,
        options,
        o.timeout,
        o.group_id,
        global_ranks,
        make_nccl,
        _C.find_backend(dist.group.WORLD.group_name) if dist.is_initialized() else None,
    )
    note_rank(backend.options.global_ranks_in_group[o.group_rank])
    _announce(backend, o.group_rank, o.group_size)
    return backend


def without_nccl(options: _C.Options | None) -> _C.Options:
    """Options of a group that does not inherit NCCL from the default group: NCCL's watchdog ends a process that lost a peer."""
    options = options if options is not None else _C.Options()
    if options.nccl is not None or os.environ.get("LOWCOMM_NCCL"):
        return options
    return _C.Options(**{**{name: getattr(options, name) for name in FIELDS}, "nccl": False})


def _announce(backend: Any, rank: int, size: int) -> None:
    caution_of_policy(backend.policy)
    if backend.policy:
        what = (
            f"compresses {backend.policy} for float32, float16 and bfloat16 contributions of at least "
            f"{backend.min_bytes} bytes; buckets run over each op's flat buffer, without a filter for norms and biases"
        )
    else:
        what = "compresses nothing (no policy): exact"
    logger.info("lowcomm group %s, rank %d of %d, kernels %s: %s", backend.group_name, rank, size, _C.kernels(), what)
