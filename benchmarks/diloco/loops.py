"""An inner optimizer with the outer loop of a case around it, and what that took of the training thread."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import torch_lowcomm as lc
from diloco.cases import MOMENTUM, OUTER_LR, Case


class Alone:
    """No outer loop.

    `step` is the optimizer's, after a backward; `waited_s` what of it so far was waiting for the network, in seconds. After
    `finish` the last averages are applied, and after `close` nothing of a loop goes on.
    """

    waited_s = 0.0

    def __init__(self, case: Case, gpt: nn.Module, inner: torch.optim.Optimizer, job: dict[str, Any]) -> None:
        self._inner = inner

    def step(self) -> None:
        """The inner one."""
        self._inner.step()

    def finish(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lowcomm:
    """`lc.DiLoCoX`."""

    def __init__(self, case: Case, gpt: nn.Module, inner: torch.optim.Optimizer, job: dict[str, Any]) -> None:
        self.waited_s = 0.0
        self._every: int = job["every"]
        self._outer = lc.DiLoCoX(
            inner,
            self._every,
            mode=case.mode,
            model=gpt,
            codec=case.codec,
            rank=case.rank,
            outer_lr=OUTER_LR,
            outer_momentum=MOMENTUM,
            fragments=case.fragments,
            fragment_sync_delay=case.delay,
        )
        sends = [self._every * (f + 1) // case.fragments for f in range(case.fragments)]
        # After which steps the report is of an average that has just come.
        self._arrivals = {(at + (case.delay or 0)) % self._every for at in sends}

    def step(self) -> None:
        """The wrapper's."""
        self._outer.step()
        if self._outer.steps % self._every in self._arrivals:
            self.waited_s += self._outer.report["waited_s"]

    def finish(self) -> None:
        """The wrapper's."""
        self._outer.finish()

    def close(self) -> None:
        """Nothing: its group stays, idle."""


class InnerEnd:
    """When an optimizer's last step ended. To be made before the loop around it, whose own hooks come after."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.at = 0.0
        inner.register_step_post_hook(self._ended)

    def _ended(self, *_: object) -> None:
        self.at = time.perf_counter()
