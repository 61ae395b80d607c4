"""The rows of the matrix: what is done to whom and when, and which rows cannot exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather", "send/recv")
KINDS = ("exact", "compressed")
SPEC = "sym4:bucket=1024"

SIGNALS = ("kill -9", "SIGSTOP")
CUTS = ("long cut", "short cut")
DIFFERENCES = ("another op", "another shape", "another codec")
# The other op that a rank calls in place of its own.
OTHER = {
    "all_reduce": "broadcast",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_gather",
    "broadcast": "all_reduce",
    "gather": "broadcast",
    "send/recv": "all_reduce",
}
FAULTS = (*SIGNALS, *CUTS, *DIFFERENCES)
WHEN = ("before", "during", "after")
SIZES = (2, 4)

# An op, and others after it: a rank that needs nothing more from the one that finds the fault hears of it in a later op.
ATTEMPTS = 3
SLACK_S = 2.0  # how much later than the deadline an error may come


@dataclasses.dataclass(frozen=True)
class Case:
    """One row. The faulty rank is the last one; a broadcast's root is the last one too, a gather's is rank 0."""

    op: str
    kind: str
    fault: str
    when: str
    size: int

    alone = False  # other rows may run beside it

    @property
    def name(self) -> str:
        """Returns the text that `--only` matches: `all_reduce,compressed,kill -9,during,4`."""
        return f"{self.op},{self.kind},{self.fault},{self.when},{self.size}"

    @property
    def compressed(self) -> bool:
        """Whether a codec is in force."""
        return self.kind == "compressed"

    @property
    def culprit(self) -> int:
        """The faulty rank."""
        return self.size - 1

    @property
    def needs_lab(self) -> bool:
        """Whether links are slow: they are cut, or the fault is to come while bytes are on the way."""
        return self.fault in CUTS or (self.fault in SIGNALS and self.when == "during")

    @property
    def recovers(self) -> bool:
        """Whether nothing may fail."""
        return self.fault == "short cut"

    @property
    def deadline_s(self) -> float:
        """The group's time-out; links of a lab are slow, so theirs is longer, and longer still where it must not pass."""
        return {"long cut": 2.0, "short cut": 6.0}.get(self.fault, 1.0)

    @property
    def attempts(self) -> int:
        """Ops that a rank calls, until one fails."""
        return 2 if self.recovers else ATTEMPTS

    def called(self, rank: int, attempt: int) -> str:
        """Returns the op that a rank calls in an attempt, counted from 0."""
        return OTHER[self.op] if self.fault == "another op" and rank == self.culprit and attempt == 0 else self.op

    @property
    def survivors(self) -> int:
        """Ranks of the group that is made afterwards."""
        return self.size - 1 if self.fault == "kill -9" else self.size

    def impossible(self) -> str:
        """Why there is no such row; empty where there is one."""
        if self.fault == "another codec" and not self.compressed:
            return "nothing has a codec, and a group whose ranks' policies differ is refused when it is made"
        return ""


def matrix() -> Iterator[Case]:
    """Every row, in the order of the table."""
    for op in OPS:
        for kind in KINDS:
            for fault in FAULTS:
                for when in WHEN:
                    for size in SIZES:
                        yield Case(op, kind, fault, when, size)
