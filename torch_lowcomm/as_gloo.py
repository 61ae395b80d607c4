"""lowcomm in gloo's place, for scripts that ask for "gloo" and must not be edited.

`python -m torch_lowcomm run script.py` calls `install`. So does `import torch` in every process whose environment says
LOWCOMM_AS_GLOO=1 (`_torch_lowcomm_autoload`): `run` sets it for the processes that the script starts.
"""

import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from torch_lowcomm import _C
from torch_lowcomm._create import create_backend, without_nccl
from torch_lowcomm._log import logger


class _GlooLike(type):
    """Makes `isinstance(backend, ProcessGroupGloo)`, which torch asks of a new backend, true for lowcomm's too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (ProcessGroupGloo, _C.LowcommBackend))


class _GlooStandIn(metaclass=_GlooLike):
    """distributed_c10d calls it in place of ProcessGroupGloo; its other names are those of that class."""

    _Options = Options = ProcessGroupGloo._Options
    create_device = ProcessGroupGloo.create_device
    create_default_device = ProcessGroupGloo.create_default_device

    def __new__(
        cls, store: Store, rank: int, size: int, timeout: timedelta = c10d.default_pg_timeout, **wanted: Any
    ) -> Any:
        """Makes the group's backend. `wanted` is what later torch can ask of gloo (`enable_reconfigure`). A group for which
        something is asked, not False or None, is gloo's, for lowcomm has none of it.
        """
        more = {name: value for name, value in wanted.items() if value}
        if more:
            asked = ", ".join(f"{name}={value}" for name, value in more.items())
            logger.warning("a group that asks gloo for %s is gloo's and not lowcomm's: it compresses nothing", asked)
            return ProcessGroupGloo(store, rank, size, timeout=timeout, **more)
        name, ranks = _group_being_made()
        opts = SimpleNamespace(
            store=store, group_rank=rank, group_size=size, timeout=timeout, group_id=name, global_ranks_in_group=ranks
        )
        options = without_nccl(None)  # a script says "gloo" where ranks share a GPU, or NCCL cannot connect
        options._name = "gloo"  # scripts may look for this name in the backend and in the profiler's titles
        return create_backend(opts, options)


def _group_being_made() -> tuple[str, list[int]]:
    """Returns name and ranks of the group from the frame of torch's helper, because torch does not pass them to gloo."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_new_process_group_helper":
            found = frame.f_locals
            return str(found.get("group_name") or "gloo"), list(found.get("global_ranks_in_group") or [])
        frame = frame.f_back
    return "gloo", []


def install() -> None:
    """Makes new groups of this process that ask for "gloo" groups of lowcomm; their name stays "gloo".

    Policy and sizes come from the environment (LOWCOMM_POLICY, …). It may be called any number of times.
    """
    c10d.ProcessGroupGloo = _GlooStandIn
