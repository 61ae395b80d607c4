"""Finds the DDP models around parameters: DDP averages their gradients in every step, which not every optimizer goes with."""

import gc
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def without_ddp(module: Any) -> Any:
    """Returns the module inside torch's DDP; any other value as it is."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def ranks_of_ddp(parameters: Iterable[torch.Tensor]) -> set[int]:
    """Returns the global ranks over which DDP averages the gradients of parameters; none where no DDP model has one of them.

    A parameter does not know of the DDP model that it is in: the search looks at all living objects, for some 50 ms. It
    does not see what `gc.freeze()` has put aside.
    """
    wanted = {id(p) for p in parameters if p.requires_grad}
    if _around(wanted):
        gc.collect()  # of a model that the program has dropped nothing is left then
    return _around(wanted)


def _around(wanted: set[int]) -> set[int]:
    models = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    around = [model for model in models if any(id(p) in wanted for p in model.module.parameters())]
    return {rank for model in around for rank in _ranks_of(model.process_group)}


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # a group that was destroyed
        return []
