"""Finds the DDP models around parameters: DDP averages their gradients in every step, which not every optimizer goes with."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def ranks_of_ddp(parameters: Iterable[torch.Tensor]) -> set[int]:
    """Returns the global ranks over which DDP averages the gradients of parameters; none where no DDP model has one of them.

    A parameter does not know of the DDP model that it is in: the search looks at all living objects, for some 50 ms.

    Args:
        parameters: Those of an optimizer.
    """
    wanted = {id(p) for p in parameters if p.requires_grad}
    models = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    around = [model for model in models if any(id(p) in wanted for p in model.module.parameters())]
    return {rank for model in around for rank in dist.get_process_group_ranks(model.process_group)}
