"""Weights that FSDP2 has gathered, where their shards change."""

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard(model: nn.Module | None) -> None:
    """Lets FSDP2 forget the weights that it gathered: the root's stay after a forward, and do not follow their shards."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, FSDPModule):
            module.reshard()
