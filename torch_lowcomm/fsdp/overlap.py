"""Communication while a module computes, where FSDP2 would wait for every op at once; no bit of any result changes.

On the CPU FSDP2 has no streams. On CUDA the host waits for an op of lowcomm, and FSDP2 would wait before it launches the
kernels that could run meanwhile. A gather's Work it gets, and waits for it where it copies the weights out;
`ForwardPrefetch` issues gathers of the forward pass early, FSDP2 itself those of the backward pass. A reduction's output it
uses at once: `DeferredReductions` waits for it, and adds to gradients, in its place.
"""

import contextlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torch_lowcomm._log import logger
from torch_lowcomm.fsdp import _torch_2_11 as fsdp2
from torch_lowcomm.fsdp.weight_version import WeightVersion


class _Reduction(NamedTuple):
    work: dist.Work
    gradients: list[tuple[nn.Parameter, torch.Tensor | None]]  # (parameter, its gradient before this reduction)
    stream: torch.Stream | None  # the stream on which FSDP2 allocated the output; None on the CPU

    def end(self) -> None:
        """Waits and adds to the earlier gradients; after a failure it restores them."""
        try:
            self.work.wait()
        except Exception:
            for parameter, before in self.gradients:
                parameter.grad = before
            raise
        # On the output's own stream, to which its memory returns. It waits for the current stream, as that waits for the
        # reduction; the current stream then waits for it.
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))
        with self.stream or contextlib.nullcontext():
            for parameter, before in self.gradients:
                if before is not None and parameter.grad is not None:  # None: the backward pass failed
                    before._local_tensor += parameter.grad._local_tensor  # as FSDP2 accumulates
                    parameter.grad = before
        if self.stream is not None:
            torch.accelerator.current_stream(self.stream.device).wait_stream(self.stream)


class DeferredReductions:
    """The reduce-scatter of one module of a model, which goes on while the next module's backward runs."""

    def __init__(self) -> None:
        self._under_way: _Reduction | None = None

    def take(self, group: fsdp2.ParameterGroup, work: dist.Work, output: torch.Tensor, op: Any) -> bool:
        """Takes a reduction of all gradients of a module's `group`, to wait for it by the end of this backward pass.

        It has just been issued, after a `wait()` for the one before, and FSDP2 is about to make `.grad`s of its output; after the
        op SUM it divides. False if FSDP2 reads the output at once, so that the caller must wait; nothing has changed.
        """
        at_once = op == dist.ReduceOp.SUM or not fsdp2.in_backward()
        if at_once or not group.only_stores_reduced(output.dtype):
            return False
        stream = torch.accelerator.current_stream(output.device) if output.is_cuda else None
        reduction = _Reduction(work, group.take_gradients(), stream)
        fsdp2.at_end_of_backward(self.wait, self.settle)
        self._under_way = reduction
        return True

    def settle(self) -> None:
        """Waits for the reduction under way in a backward pass that broke off, so that gradients are as without overlap. The
        pass raises its own error; an error of the reduction is logged.
        """
        try:
            self.wait()
        except Exception as error:
            logger.warning("fsdp: a backward pass broke off, and the reduction under way in it failed: %s", error)

    def wait(self) -> None:
        """Waits for the reduction under way, if any, and raises its error."""
        reduction, self._under_way = self._under_way, None
        if reduction is not None:
            reduction.end()


class ForwardPrefetch:
    """Gathers the weights of the next module when a module has its weights and begins to compute.

    The next module is the one that came next in the model's last forward pass, among modules that ran once in it. A gather
    that no module used is dropped at the end of the pass, because weights may change before a module asks for them.
    Modules that are called from outside `model.forward` prefetch nothing.
    """

    def __init__(self, model: nn.Module, groups: list[tuple[fsdp2.ParameterGroup, WeightVersion]]) -> None:
        self._versions = {group.module: version for group, version in groups}
        self._next: dict[nn.Module, fsdp2.ParameterGroup] = {}
        self._ran: list[fsdp2.ParameterGroup] | None = None  # None: not in a pass
        self._prefetched: fsdp2.ParameterGroup | None = None
        self._mark: Any = None  # version of the prefetched module's weights before
        model.register_forward_pre_hook(self._begin)
        for group, _ in groups:
            # It runs after FSDP2's own hook, which comes first and waits for the module's weights.
            group.module.register_forward_pre_hook(lambda *_, group=group: self._enter(group))
        model.register_forward_hook(self._end, always_call=True)

    @fsdp2.outside_compile
    def _begin(self, *_: Any) -> None:
        if not fsdp2.in_backward():  # a recomputed pass runs in backward
            self._ran = []

    @fsdp2.outside_compile
    def _enter(self, group: fsdp2.ParameterGroup) -> None:
        if self._ran is None or fsdp2.in_backward():
            return
        self._ran.append(group)
        if group is self._prefetched:
            self._prefetched = None
        following = self._next.get(group.module)
        if self._prefetched is None and following is not None:
            mark = self._versions[following.module].mark()
            if following.prefetch():
                self._prefetched, self._mark = following, mark

    @fsdp2.outside_compile
    def _end(self, *_: Any) -> None:
        if self._ran is None or fsdp2.in_backward():
            return
        ran, self._ran = self._ran, None
        modules = [group.module for group in ran]
        self._next = {
            module: after for module, after in zip(modules, ran[1:], strict=False) if modules.count(module) == 1
        }
        dropped, self._prefetched = self._prefetched, None
        if dropped is not None:
            self._versions[dropped.module].restore(self._mark)
            dropped.drop_prefetched()
