"""The outer loops that are measured, by name."""

from __future__ import annotations

import dataclasses

INT4 = "sym4:bucket=128"
OUTER_LR = 0.7


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of training.

    `loop`: "alone" (no communication), "lowcomm" (`lc.DiLoCoX` with the fields below), or "torchft" (its DiLoCo, which with
    a delay is its Streaming DiLoCo). `delay` in inner steps; None: a whole interval, or none with mode sync.
    """

    name: str
    loop: str = "lowcomm"
    mode: str = "continue"
    codec: str | None = INT4
    rank: int | None = None
    residual: str = "float32"
    fragments: int = 1
    delay: int | None = None
    momentum: float = 0.6

    @property
    def ours(self) -> bool:
        """Whether it is what the gates are about."""
        return self.loop == "lowcomm"

    @property
    def blocking(self) -> bool:
        """Whether training stands still while an average is on its way, or there is none."""
        return self.loop == "alone" or self.mode == "sync" or (self.loop == "torchft" and self.delay is None)


ALONE = "no communication"

CASES = [
    Case(ALONE, "alone"),
    Case("continue fp32", codec=None),
    Case("continue int4"),
    Case("continue gauss2", codec="gauss2"),
    Case("continue rank 64, int4", rank=64),
    Case("continue rank 16, int4", rank=16),
    Case("sync fp32", mode="sync", codec=None, momentum=0.9),
    Case("sync int4", mode="sync", momentum=0.9),
    Case("sync gauss2", mode="sync", codec="gauss2", momentum=0.9),
    Case("sync rank 64, int4", mode="sync", rank=64, momentum=0.9),
    Case("sync rank 16, int4", mode="sync", rank=16, momentum=0.9),
    Case("streaming fp32", mode="restart", codec=None, fragments=2, delay=5),
    Case("streaming int4", mode="restart", fragments=2, delay=5),
    Case("streaming gauss2", mode="restart", codec="gauss2", fragments=2, delay=5),
    Case("streaming rank 64, int4", mode="restart", rank=64, fragments=2, delay=5),
    Case("streaming rank 16, int4", mode="restart", rank=16, fragments=2, delay=5),
    Case("torchft DiLoCo", "torchft", momentum=0.9),
    Case("torchft Streaming", "torchft", fragments=2, delay=5),
]

# Ours, and the peer's that has the same outer optimizer, fragments and delay.
PAIRS = [
    ("sync int4", "torchft DiLoCo"),
    ("sync gauss2", "torchft DiLoCo"),
    ("streaming int4", "torchft Streaming"),
    ("streaming gauss2", "torchft Streaming"),
]


def chosen(only: list[str] | None, *, peer: bool) -> list[Case]:
    """The cases whose names hold one of `only` (None: all), always with the one without communication.

    Raises:
        ValueError: No case has such a name.
    """
    known = [case for case in CASES if peer or case.loop != "torchft"]
    for word in only or []:
        if not any(word in case.name for case in known):
            raise ValueError(f"--only: expected part of a name among {[case.name for case in known]}, got {word!r}")
    return [case for case in known if case.name == ALONE or only is None or any(word in case.name for word in only)]
