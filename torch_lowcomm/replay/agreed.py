"""What the machines of a run have agreed on: the values of the keys `head`, `log/<iteration>` and `founded`."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What one iteration comes to: written once, the same on all machines.

    Attributes:
        iteration: Of the record; one less than the first where the run has only been founded.
        record: What all apply (`SeedReplay.record`); b"" where the run has only been founded.
        machines: Numbers of those who take part in the next iteration, those first who have been in it for longest.
        asked: Asks to take part that have been answered, by being among `machines` or not.
        closer: Number of the machine that wrote this.
        takeovers: How often the next iteration's machines were written anew, because all of them were gone.
    """

    iteration: int
    record: bytes
    machines: tuple[int, ...]
    asked: int
    closer: int
    takeovers: int = 0

    def encode(self) -> bytes:
        """One line of JSON, then the record."""
        head = {
            "iteration": self.iteration,
            "machines": self.machines,
            "asked": self.asked,
            "closer": self.closer,
            "takeovers": self.takeovers,
        }
        return json.dumps(head).encode() + b"\n" + self.record

    @staticmethod
    def decode(value: bytes) -> Agreed:
        """Of what encode() returned. ValueError for anything else."""
        line, _, record = value.partition(b"\n")
        try:
            head = json.loads(line)
            machines = tuple(map(int, head["machines"]))
            return Agreed(head["iteration"], record, machines, head["asked"], head["closer"], head["takeovers"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"seed replay: expected what machines agreed on, got {value[:80]!r}") from error


@dataclasses.dataclass(frozen=True)
class Founded:
    """How a run began at this store.

    Attributes:
        iteration: The first that is agreed on here; not 0 where a run goes on at a new store.
        checksum: Of the weights before it.
        machines: Numbers of those who take part in it, ascending.
        asked: Asks answered so.
        source: Number of the machine whose records of earlier iterations are at the store.
        earlier: Whether there are any.
    """

    iteration: int
    checksum: int
    machines: tuple[int, ...]
    asked: int
    source: int
    earlier: bool

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def decode(value: bytes) -> Founded:
        """Of what encode() returned."""
        told = json.loads(value)
        return Founded(**{**told, "machines": tuple(told["machines"])})

    def head(self) -> Agreed:
        """The first value of `head`, the same whoever sets it."""
        return Agreed(self.iteration - 1, b"", self.machines, self.asked, self.source)
