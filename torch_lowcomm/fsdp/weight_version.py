"""When weights change: what the random draws of a weight codec are counted by.

The codes of a step's forward, backward, recomputations and accumulated micro-batches must be the same, and those of the
next step must not share their draws. So the count changes when an optimizer writes the parameters, and only then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_living: weakref.WeakSet[WeightVersion] = weakref.WeakSet()
_hooked = False


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for version in _living:
        version.note_step(stepped)


class WeightVersion:
    """Counts the writes to one group of parameters.

    torch.optim's step is seen by its hook (fused and foreach steps on DTensors leave tensor versions alone); an optimizer
    that is not torch's is seen by the tensors' own version counters, which its in-place writes raise.
    """

    def __init__(self, parameters: Callable[[], list[nn.Parameter]]) -> None:
        global _hooked
        if not _hooked:
            register_optimizer_step_post_hook(_after_step)
            _hooked = True
        self._parameters = parameters
        self._steps = 0
        _living.add(self)

    def note_step(self, stepped: set[int]) -> None:
        """An optimizer stepped the parameters with these ids."""
        self._steps += any(id(p) in stepped for p in self._parameters())

    def version(self) -> int:
        """A number that grows with every write and is the same between two."""
        return self._steps + sum(p._version for p in self._parameters())

    def set_version(self, version: int) -> None:
        """Make it `version` now: what a checkpoint said."""
        self._steps += version - self.version()
