"""All that lowcomm knows of FSDP2's private parts, for torch 2.11 to 2.15; test_fsdp_adapter.py holds it to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = [
    "AllGather",
    "ParameterGroup",
    "ReduceScatter",
    "ShardedParameter",
    "all_gather_single",
    "new_buffer",
    "parameter_groups",
    "reduce_scatter_single",
]


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter as FSDP2 puts it into its flat buffers."""

    names: list[str]  # fully qualified, from the model's root; several where it is tied
    parameter: nn.Parameter  # the sharded DTensor parameter, of the global shape
    shard_numel: int  # elements a rank contributes, padding included
    has_extension: bool  # a tensor subclass that decides itself what is gathered


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters that one `fully_shard` call gathers and reduces together."""

    module: FSDPModule
    parameters: list[ShardedParameter]
    group: dist.ProcessGroup  # the ranks that shard
    _private: Any

    def live_parameters(self) -> list[nn.Parameter]:
        """The sharded parameters as they are now: loading a checkpoint may have replaced some."""
        return [p.sharded_param for p in self._private.fsdp_params]

    def trained(self) -> list[bool]:
        """Which of the parameters have gradients now: freezing may change it."""
        return [p.sharded_param.requires_grad for p in self._private.fsdp_params]

    def uses_custom_comm(self, kind: type) -> bool:
        """Whether a comm object of this class is already installed."""
        return isinstance(self._private._all_gather_comm, kind) or isinstance(self._private._reduce_scatter_comm, kind)


def _groups_of(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def parameter_groups(model: nn.Module) -> Iterator[ParameterGroup]:
    """Every parameter group of a model wrapped by `fully_shard`, in the order of `model.modules()`.

    Raises:
        ValueError: A module has several parameter groups (per-parameter meshes), which torch's custom comms exclude, or
            is wrapped by `replicate`, which shards nothing.
    """
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = _groups_of(module)
        if len(groups) > 1:
            raise ValueError(
                f"fsdp.quantize: expected one parameter group a wrapped module, got {len(groups)} "
                f"in {type(module).__name__} (parameters on different meshes)"
            )
        for private in groups:
            if not hasattr(private.mesh_info, "shard_process_group"):
                raise ValueError(
                    f"fsdp.quantize: expected modules wrapped by fully_shard, got {type(module).__name__}, whose "
                    "parameters are not sharded"
                )
            yield ParameterGroup(
                module,
                [_describe(p, names) for p in private.fsdp_params],
                private.mesh_info.shard_process_group,
                private,
            )


def _describe(p: Any, names: dict[int, list[str]]) -> ShardedParameter:
    # The module holds one of the two, by whether it is gathered just now.
    registered = names.get(id(p.sharded_param)) or names.get(id(getattr(p, "_unsharded_param", None)))
    if not registered:
        raise ValueError(
            f"fsdp.quantize: expected every sharded parameter among the model's, got one of shape "
            f"{tuple(p.sharded_param.shape)} that model.named_parameters() does not list"
        )
    return ShardedParameter(
        names=registered,
        parameter=p.sharded_param,
        shard_numel=p._sharded_param_data.numel(),
        has_extension=hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather"),
    )


# The names that 2.13 gave them; the old ones warn there.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def new_buffer(size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What FSDP2's own comms allocate."""
    return torch.empty(*size, dtype=dtype, device=device)
