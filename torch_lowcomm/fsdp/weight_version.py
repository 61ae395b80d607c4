"""When weights change: what the random draws of a weight codec are counted by.

The codes of a step's forward, backward, recomputations and accumulated micro-batches must be the same, and those of the
next step must not share their draws. So the count changes when the parameters were written since the last gather, and
only then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_living: weakref.WeakSet[WeightVersion] = weakref.WeakSet()
_hooked = False


def _writes_nothing(optimizer: Optimizer) -> bool:
    """A step at learning rate 0: how torch's checkpoint helpers make an optimizer initialise its state."""
    return all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if _writes_nothing(optimizer):
        for version in _living:
            version.settle()  # what was written before is counted, what this step does to the counters is not


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if _writes_nothing(optimizer):
        for version in _living:
            version.overlook()
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for version in _living:
        version.note_step(stepped)


class WeightVersion:
    """Counts the writes to one group of parameters, those between two gathers as one.

    torch.optim's step is seen by its hook (fused and foreach steps on DTensors leave tensor versions alone); an optimizer
    that is not torch's is seen by the tensors' own version counters, which its in-place writes raise.
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
        self._seen: tuple[Any, ...] | None = None  # None: whatever the parameters are now belongs to this count
        _living.add(self)

    def note_step(self, stepped: set[int]) -> None:
        """An optimizer stepped the parameters with these ids."""
        self._steps += any(id(p) in stepped for p in self._parameters())

    def version(self) -> int:
        """A number that grows when the parameters were written since it was last asked for, by one."""
        now = self._now()
        if self._seen is not None and now != self._seen:
            self._count += 1
        self._seen = now
        return self._count

    def mark(self) -> tuple[int, tuple[Any, ...] | None]:
        """Where the count stands, for `restore`."""
        return self._count, self._seen

    def restore(self, mark: tuple[int, tuple[Any, ...] | None]) -> None:
        """As if it had not been asked for since: for a gather that nobody used."""
        self._count, self._seen = mark

    def settle(self) -> None:
        """Count what was written so far, unless a checkpoint is being loaded."""
        if self._seen is not None:
            self.version()

    def overlook(self) -> None:
        """What happened since `settle()` wrote nothing."""
        if self._seen is not None:
            self._seen = self._now()

    def set_version(self, version: int) -> None:
        """Make it `version` for the parameters as they will be when it is asked for: a checkpoint's may still load."""
        self._count = version
        self._seen = None

    def _now(self) -> tuple[Any, ...]:
        return (self._steps, *((id(p), p._version) for p in self._parameters()))
