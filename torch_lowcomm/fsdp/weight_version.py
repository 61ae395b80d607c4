"""Counts the changes of weights; the random draws of a weight codec depend on this count.

The codes of a step's forward, backward, recomputations and accumulated micro-batches must be the same, and those of the next
step must not share their draws. So the count changes if, and only if, the parameters were written since the last gather.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_living: weakref.WeakSet[WeightVersion] = weakref.WeakSet()
_hooked = False


def _versions(optimizer: Optimizer) -> list[WeightVersion]:
    """Those of parameters that an optimizer steps; none for the optimizer of another model."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [version for version in _living if version.has_one_of(stepped)]


def _writes_nothing(optimizer: Optimizer) -> bool:
    """Whether an optimizer steps at learning rate 0, as torch's checkpoint helpers do to initialise its state."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return all(isinstance(rate, (int, float, Tensor)) and float(rate) == 0.0 for rate in rates)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    versions = _versions(optimizer)
    if versions and _writes_nothing(optimizer):
        for version in versions:
            version.settle()  # counts earlier writes; `overlook` then hides what this step does to the counters


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    versions = _versions(optimizer)
    writes_nothing = bool(versions) and _writes_nothing(optimizer)
    for version in versions:
        if writes_nothing:
            version.overlook()
        else:
            version.note_step()


class WeightVersion:
    """Counts the writes to one group of parameters; all writes between two gathers count as one.

    A hook sees the steps of torch.optim (fused and foreach steps on DTensors do not change tensor versions). The tensors'
    version counters show the in-place writes of other optimizers.
    """

    def __init__(self, parameters: Callable[[], list[nn.Parameter]]) -> None:
        global _hooked
        if not _hooked:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _hooked = True
        self._parameters = parameters
        self._steps = 0
        self._count = 0
        self._seen: tuple[Any, ...] | None = None  # None: the parameters as they are now belong to this count
        _living.add(self)

    def has_one_of(self, parameters: set[int]) -> bool:
        """Whether one of its parameters has one of these ids."""
        return any(id(p) in parameters for p in self._parameters())

    def note_step(self) -> None:
        """Notes that an optimizer stepped its parameters."""
        self._steps += 1

    def version(self) -> int:
        """Returns the count, which grows by one if the parameters were written since the last call."""
        now = self._now()
        if self._seen is not None and now != self._seen:
            self._count += 1
        self._seen = now
        return self._count

    def mark(self) -> tuple[int, tuple[Any, ...] | None]:
        """Returns the count for `restore`."""
        return self._count, self._seen

    def restore(self, mark: tuple[int, tuple[Any, ...] | None]) -> None:
        """Restores the count of `mark`, after a gather that was not used."""
        self._count, self._seen = mark

    def settle(self) -> None:
        """Counts earlier writes, unless a checkpoint is being loaded."""
        if self._seen is not None:
            self.version()

    def overlook(self) -> None:
        """Notes that no parameter was written since `settle()`."""
        if self._seen is not None:
            self._seen = self._now()

    def set_version(self, version: int) -> None:
        """Sets the count for the parameters as they will be at the next call: a checkpoint's may still be loading."""
        self._count = version
        self._seen = None

    def _now(self) -> tuple[Any, ...]:
        return (self._steps, *((id(p), p._version) for p in self._parameters()))
