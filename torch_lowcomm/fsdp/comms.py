"""FSDP2's two comm objects. Each sends one message for a wrapped module, with a codec for each parameter.

With them what FSDP2 does not save of a model: counts of random draws, learned levels.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm._copies import NotCopied
from torch_lowcomm._log import logger
from torch_lowcomm._torch_names import all_gather_single, reduce_scatter_single
from torch_lowcomm.codec import CODED
from torch_lowcomm.fsdp import _torch_2_11 as fsdp2
from torch_lowcomm.fsdp.hosts import HostComms
from torch_lowcomm.fsdp.levels import Levels
from torch_lowcomm.fsdp.overlap import DeferredReductions
from torch_lowcomm.fsdp.plan import Plan
from torch_lowcomm.fsdp.weight_version import WeightVersion
from torch_lowcomm.groups import backend_of, exact
from torch_lowcomm.reduction import as_op


class _LayoutComm:
    """The part of both comm objects that they share: the agreed layout, and when it does not apply."""

    def __init__(self, group: dist.ProcessGroup, levels: Levels, draws: int, carrier: HostComms | None) -> None:
        self._group_name = group.group_name
        self.carrier = carrier
        self.levels = levels
        self._slot = (carrier or backend_of(group)).reserve_slots(draws * len(levels.layout))
        self._said: set[str] = set()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates one of FSDP2's flat buffers: `size` elements of `dtype` on `device`."""
        return fsdp2.new_buffer(size, dtype, device)

    def _why_exact(self, group: dist.ProcessGroup, tensor: torch.Tensor, elements: int) -> str | None:
        """Returns why the layout does not describe this buffer, or None if it does."""
        if _C.in_exact():
            return "inside lc.exact()"
        if group.group_name != self._group_name:
            return f"it goes over group {group.group_name}, not {self._group_name}"
        if tensor.dtype == torch.uint8:
            return "its parameters have several dtypes, or gather bytes"
        if tensor.dtype not in CODED:
            return f"its dtype is {tensor.dtype}"
        if elements != self.levels.layout.elements:
            return f"it has {elements} elements a rank, the layout {self.levels.layout.elements}"
        return None

    def _note_exact(self, group: dist.ProcessGroup, op: str, why: str) -> None:
        """Counts the reason in stats(), and logs it once."""
        backend = _C.find_backend(group.group_name)
        if backend is not None:
            backend.note_exact(op, why)
        if why not in self._said:
            self._said.add(why)
            logger.info("fsdp: an %s of group %s travels exact: %s", op, group.group_name, why)


class QuantizedAllGather(_LayoutComm, fsdp2.AllGather):
    """Weights: each rank encodes its shard once, and all ranks decode the codes, the owner too (QSDP, section 3.3)."""

    def __init__(self, plan: Plan, carrier: HostComms | None, *, overlap: bool) -> None:
        super().__init__(plan.group.group, plan.gather, 1, carrier)
        self.weights = WeightVersion(plan.group.live_parameters)
        self.master = plan.master
        self._unit = plan.unit
        self._overlap = overlap

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gathers [n] of every rank into [W·n], with the same codes until the optimizer writes the shard. Returns the Work
        with `async_op` or with overlap, else None; FSDP2 waits for a Work where it needs the weights.
        """
        async_op = async_op or self._overlap
        if self._unit is not None and input_tensor.dtype == torch.uint8:
            input_tensor, output_tensor = input_tensor.view(self._unit), output_tensor.view(self._unit)
        why = self._why_exact(group, input_tensor, input_tensor.numel())
        if why is None and self.master and self.master.holds_decoded_only(self.weights.version()):
            why = "the weights were saved as they were decoded"
        if why:
            self._note_exact(group, "all_gather", why)
            with exact():
                return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        version = self.weights.version()
        layout = self.levels.at(version, [input_tensor], group)
        encoded = self.master.to_encode(version, input_tensor) if self.master else None
        work = (self.carrier or backend_of(group)).all_gather_layout(
            output_tensor, input_tensor, layout, slot=self._slot, step=version % 2**32
        )
        if self.master and encoded is not None:
            work.wait()  # `settle` writes the shard
            self.master.settle(version, encoded, output_tensor.view(group.size(), -1)[group.rank()])
            self.weights.overlook()
        return work if async_op else work.wait() and None


class QuantizedReduceScatter(_LayoutComm, fsdp2.ReduceScatter):
    """Gradients: each slice is encoded for its owner, which sums in rank order in float32 (QSDP, section 3.3)."""

    def __init__(
        self, plan: Plan, carrier: HostComms | None, weights: WeightVersion, deferred: DeferredReductions | None
    ) -> None:
        # Every segment of every slice has separate draws.
        super().__init__(plan.group.group, plan.reduce, plan.group.group.size(), carrier)
        self._weights = weights  # counts the steps at which levels are learned
        self._module = plan.group
        self._planned = plan.group.trained()
        self._deferred = deferred
        self.calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates one of FSDP2's flat buffers, after the reduction before has ended: there is one buffer at a time."""
        if self._deferred is not None:
            self._deferred.wait()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduces [W·n] to this rank's [n]. Every call has new draws, so that accumulated micro-batches share none. Returns
        the Work with `async_op`, or if a later step waits for it (overlap); else None.
        """
        why = self._why_exact(group, input_tensor, output_tensor.numel())
        if why is None and self._module.trained() != self._planned:
            why = "other parameters have gradients than when quantize was called"
        if why:
            self._note_exact(group, "reduce_scatter", why)
            with exact():
                return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        slices = input_tensor.view(group.size(), -1)
        coded = [gradient for owner, gradient in enumerate(slices) if owner != group.rank()]
        layout = self.levels.at(self._weights.version(), coded, group)
        self.calls += 1
        work = (self.carrier or backend_of(group)).reduce_scatter_layout(
            output_tensor,
            input_tensor,
            layout,
            as_op(op),
            slot=self._slot,
            step=self.calls % 2**32,
        )
        if async_op or (self._deferred is not None and self._deferred.take(self._module, work, output_tensor, op)):
            return work
        work.wait()
        return None


def install(
    plan: Plan, deferred: DeferredReductions | None, carrier: HostComms | None
) -> tuple[QuantizedAllGather, QuantizedReduceScatter]:
    """Installs the comm objects in a wrapped module. It cannot fail, because the ranks have agreed."""
    gather = QuantizedAllGather(plan, carrier, overlap=deferred is not None)
    reduction = QuantizedReduceScatter(plan, carrier, gather.weights, deferred)
    plan.group.module.set_custom_all_gather(gather)
    plan.group.module.set_custom_reduce_scatter(reduction)
    return gather, reduction


class QuantizedComms(NotCopied):
    """Handle of a model's quantized communication; a `torch.distributed.checkpoint` Stateful.

    Stochastic codecs draw by the numbers of the step and of the reduction. A run that resumes with these counters has the same
    draws as the uninterrupted run. Save the handle with model and optimizer and load all three, in any order, before the next
    forward pass. Learned levels are saved with it, by the parameters' names, and may be loaded on another number of ranks.

    Attributes:
        hosts: With `quantize(hosts=…)` the groups of both levels: `lc.stats(handle.hosts.between)` has what this rank put
            on the slow link. Else None.
    """

    def __init__(
        self,
        gathers: list[QuantizedAllGather],
        reductions: list[QuantizedReduceScatter],
        hosts: HostComms | None = None,
    ) -> None:
        self.hosts = hosts
        self._gathers = gathers
        self._reductions = reductions

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, with keys by the number <g> of a wrapped module.

        Returns:
            {"weights.<g>": version of the module's weights, "gradients.<g>": reductions so far}, as integers. With levels
            codecs also their tables, "weights.<g>.levels" and "gradients.<g>.levels". With a quantized master also
            "master.<g>": whether the shard is the decoded value of that version.
        """
        state: dict[str, Any] = {}
        for i, (gather, reduction) in enumerate(zip(self._gathers, self._reductions, strict=True)):
            state[f"weights.{i}"] = gather.weights.version()
            state[f"gradients.{i}"] = reduction.calls
            if gather.master:
                state[f"master.{i}"] = gather.master.holds_decoded(gather.weights.version())
        return state | {key: levels.state_dict() for key, levels in self._levels()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets counters and levels; a state of a model with other wrapped modules, codecs or master is a ValueError."""
        expected = set(self.state_dict())
        if set(state) != expected:
            raise ValueError(
                f"fsdp: expected the counters of {len(self._gathers)} wrapped modules, got {sorted(state)} "
                f"(missing: {sorted(expected - set(state))}, unexpected: {sorted(set(state) - expected)})"
            )
        for key, levels in self._levels():
            levels.check(state[key])
        for key, levels in self._levels():
            levels.load_state_dict(state[key])
        for i, (gather, reduction) in enumerate(zip(self._gathers, self._reductions, strict=True)):
            version = int(state[f"weights.{i}"])
            gather.weights.set_version(version)
            reduction.calls = int(state[f"gradients.{i}"])
            if gather.master:
                gather.master.load(version if state[f"master.{i}"] else None)

    def _levels(self) -> list[tuple[str, Any]]:
        named = [(f"weights.{i}.levels", gather.levels) for i, gather in enumerate(self._gathers)]
        named += [(f"gradients.{i}.levels", reduction.levels) for i, reduction in enumerate(self._reductions)]
        return [(key, levels) for key, levels in named if levels.learns]
