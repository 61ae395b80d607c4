"""All uses of FSDP2's private parts, for torch 2.11 to 2.15. It asks what is there, and not which version it is.

tests/torch_names.py lists the names, and test_fsdp_adapter.py tests what is believed of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter as FSDP2 puts it into its flat buffers."""

    names: list[str]  # fully qualified, from the model's root; several where it is tied
    parameter: nn.Parameter  # the sharded DTensor parameter, of the global shape
    shard_numel: int  # elements a rank contributes, padding included
    gathered_dtype: torch.dtype  # of the shard as it is gathered, which a MixedPrecisionPolicy may cast
    has_extension: bool  # whether it is a tensor subclass that decides itself what is gathered


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters that one `fully_shard` call gathers and reduces together."""

    module: FSDPModule
    parameters: list[ShardedParameter]
    group: dist.ProcessGroup  # the ranks that shard
    has_replicas: bool  # HSDP: other ranks hold the same shards
    _private: Any

    def live_parameters(self) -> list[nn.Parameter]:
        """The sharded parameters as they are now: loading a checkpoint may have replaced some."""
        return [p.sharded_param for p in self._private.fsdp_params]

    def live_shards(self) -> list[torch.Tensor]:
        """Each parameter's shard as a flat tensor of shard_numel elements, sharing the parameter's memory."""
        return [p._sharded_param_data for p in self._private.fsdp_params]

    def trained(self) -> list[bool]:
        """Tells of each parameter whether it has a gradient now; freezing may change it."""
        return [p.sharded_param.requires_grad for p in self._private.fsdp_params]

    def reduced_order(self) -> list[int]:
        """The places of the parameters in the order in which their gradients lie in a reduction's flat buffer.

        It is the order of `parameters` where all gradients have one dtype. Where they have several, later torch puts those of
        one dtype side by side.
        """
        places = range(len(self.parameters))
        if not hasattr(self._private, "_reduce_scatter_param_indices"):
            return list(places)
        dtypes = [_gradient_dtype(p) for p in self._private.fsdp_params]
        return sorted(places, key=lambda i: dtypes.index(dtypes[i]))

    def uses_custom_comm(self, kind: type) -> bool:
        """Whether a comm object of this class is already installed."""
        return isinstance(self._private._all_gather_comm, kind) or isinstance(self._private._reduce_scatter_comm, kind)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards and sum their gradients (HSDP), or None."""
        return self._private._all_reduce_process_group if self._private._is_hsdp else None

    @property
    def device(self) -> torch.device:
        """The device on which its modules compute."""
        return self._private.device

    def prefetch(self) -> bool:
        """Issues the gather that the module's forward will wait for; False if the module has its weights or its gather is
        under way.
        """
        if self._private.is_unsharded or self._private._all_gather_result is not None:
            return False
        self._private._prefetch_unshard(self._private, "forward")
        return True

    def drop_prefetched(self) -> None:
        """Waits for a gather that `prefetch` issued and no forward asked for, and drops its result."""
        result, self._private._all_gather_result = self._private._all_gather_result, None
        if result is not None and result.all_gather_work is not None:
            result.all_gather_work.wait()

    def only_stores_reduced(self, dtype: torch.dtype) -> bool:
        """Whether FSDP2 in backward only makes `.grad` views of a reduction's output of this dtype.

        It does more where it casts them, reduces them again between replicas (HSDP), offloads them or calls a hook with them.
        After a reduction with the op SUM it also divides, which this does not tell.
        """
        g = self._private
        return (
            not g._is_hsdp
            and g._all_reduce_hook is None
            and all(_gradient_dtype(p) in (dtype, None) for p in g.fsdp_params if p.sharded_param.requires_grad)
            and type(g.offload_policy) is OffloadPolicy
            and not any(getattr(p.sharded_param, "_post_accumulate_grad_hooks", None) for p in g.fsdp_params)
        )

    def take_gradients(self) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        """Returns (trained parameter, its gradient so far) and sets these gradients to None, so that FSDP2 does not add."""
        taken = [(p.sharded_param, p.sharded_param.grad) for p in self._private.fsdp_params]
        taken = [(parameter, gradient) for parameter, gradient in taken if parameter.requires_grad]
        for parameter, _ in taken:
            parameter.grad = None
        return taken


def _gradient_dtype(p: Any) -> torch.dtype | None:
    """The dtype to which FSDP2 casts a parameter's reduced gradient (in later torch its `grad_dtype`); None: the reduction's."""
    return p.sharded_grad_dtype if hasattr(p, "sharded_grad_dtype") else p.sharded_param.dtype


def _groups_of(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def parameter_groups(model: nn.Module) -> Iterator[ParameterGroup]:
    """Yields every parameter group of a model wrapped by `fully_shard`, in the order of `model.modules()`."""
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
                hasattr(private.mesh_info, "replicate_process_group"),
                private,
            )


def _describe(p: Any, names: dict[int, list[str]]) -> ShardedParameter:
    # The module holds one of the two: the unsharded one while it is gathered.
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
        gathered_dtype=p.mp_policy.param_dtype or p.sharded_param.dtype,
        has_extension=hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather"),
    )


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


# For hooks of modules that may be compiled. They are not traced, as FSDP2's are not: their state changes in every pass.
outside_compile = _disable_dynamo


class _AtEnd:
    """A callback that autograd calls at the end of a pass, and drops uncalled if the pass broke off."""

    def __init__(self, callback: Callable[[], None], broken: Callable[[], None]) -> None:
        self._callback, self._broken = callback, broken
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._callback()

    def __del__(self) -> None:
        if not self._called:
            self._broken()


def at_end_of_backward(callback: Callable[[], None], broken: Callable[[], None]) -> None:
    """Has a function called when the backward pass under way has run, after FSDP2's own callback; backward() raises what it
    raises. If the pass ends by an error, `broken`, which must not raise, is called in its place before backward() raises
    this error.
    """
    Variable._execution_engine.queue_callback(_AtEnd(callback, broken))


def new_buffer(size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates a flat buffer as FSDP2's own comms do."""
    return torch.empty(*size, dtype=dtype, device=device)
