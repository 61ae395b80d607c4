"""The warm-up of QuantizedAdam, behind which the second moment stays as it is: whether that is good enough to divide by."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torch_lowcomm._log import logger
from torch_lowcomm.diloco.parameters import local

_LEAST = 3  # Student's t distribution, of momenta over √v, has a variance from 3 squared gradients on
_TIMES = 10


class WarmUp:
    """Checks that v is a mean of enough gradients in so many exact steps, and warns where later gradients outgrow it."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._next = steps, 0, 0
        self._warned = False

    def expect_long_enough(self, beta2: float) -> None:
        """Raises ValueError where fewer than 3 squared gradients count in v after n steps.

        They are (1 − β2ⁿ)(1 + β2) / (1 + β2ⁿ)(1 − β2).
        """
        decayed = beta2 ** max(1, self._steps)
        count = (1 - decayed) * (1 + beta2) / ((1 + decayed) * (1 - beta2))
        if round(count, 2) < _LEAST:
            raise ValueError(
                f"QuantizedAdam: warmup_steps: expected so many that {_LEAST} squared gradients or more count in v, which then "
                f"stays, got {self._steps} with β2 = {beta2}, in which {count:.1f} count: a fifth of all steps is a good choice"
            )

    def resumed(self, steps: int) -> None:
        """Goes on behind so many steps."""
        self._done, self._next = steps, 0

    def stepped(
        self,
        groups: Iterable[Mapping[str, Any]],
        state: Mapping[Any, Mapping[str, torch.Tensor]],
        names: Mapping[int, str],
    ) -> None:
        """Compares m² with v̂ behind the warm-up, in steps ever further apart; `names` are the parameters' by their id()."""
        self._done += 1
        behind = self._done - self._steps
        if behind <= self._next or self._warned:
            return
        self._next = max(1, 2 * self._next)
        for group in groups:
            settled = 1 - float(group["betas"][1]) ** self._steps
            for p in group["params"]:
                if p not in state:
                    continue
                m, v = (local(state[p][name]) for name in ("exp_avg", "exp_avg_sq"))
                times = float(m.square().sum() / (v.sum() / settled).clamp_min(1e-30)) ** 0.5 if m.numel() else 0.0
                if times > _TIMES:
                    self._warned = True
                    logger.warning(
                        "QuantizedAdam: %s: its gradients are %.0f times as large as in the warm-up of %d steps, which set the "
                        "denominators: training may end in infinities. Take more warmup_steps, or a smaller lr",
                        names[id(p)],
                        times,
                        self._steps,
                    )
                    return
