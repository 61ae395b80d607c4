"""The rows of the matrix: what is done to whom and when, and which rows cannot exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather", "send/recv")
KINDS = ("exact", "compressed")
SPEC = "sym4:bucket=1024"
# The ops that lowcomm exchanges itself if nothing is compressed; gloo serves the others then.
OWN_EXACT = ("all_gather", "reduce_scatter")

SIGNALS = ("kill -9", "SIGSTOP")
CUTS = ("long cut", "short cut")
FRAMES = ("corrupted", "truncated", "duplicated", "older epoch")
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
FAULTS = (*SIGNALS, *CUTS, *FRAMES, *DIFFERENCES)
WHEN = ("before", "during", "after")
SIZES = (2, 4)

# An op, and others after it: a frame that comes twice is taken for one of the next op's, and a rank that needs nothing
# more from who finds it hears of it in the one after that.
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

    @property
    def name(self) -> str:
        """Returns the text that `--only` matches: `all_reduce,compressed,kill -9,during,4`."""
        return f"{self.op},{self.kind},{self.fault},{self.when},{self.size}"

    @property
    def own(self) -> bool:
        """Whether frames of lowcomm carry the op."""
        return self.kind == "compressed" or self.op in OWN_EXACT

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
        """Whether links are cut."""
        return self.fault in CUTS

    @property
    def alone(self) -> bool:
        """Whether no other row may run beside it: none."""
        return False

    @property
    def tapped(self) -> bool:
        """Whether the fault happens at a frame of the faulty rank's."""
        return self.fault in FRAMES or (self.fault in SIGNALS and self.when == "during" and self.own)

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

    def framed(self, rank: int, attempt: int) -> bool:
        """Whether lowcomm serves what a rank calls, and not gloo: one that leaves the codec may get gloo's op."""
        odd = self.fault == "another codec" and rank == self.culprit and attempt == 0
        return self.own and not (odd and self.op not in (*OWN_EXACT, "all_reduce"))

    @property
    def survivors(self) -> int:
        """Ranks of the group that is made afterwards."""
        return self.size - 1 if self.fault == "kill -9" else self.size

    def impossible(self) -> str:
        """Why there is no such row; empty where there is one."""
        if self.fault in FRAMES and not self.own:
            return "gloo serves it: there are no frames"
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
