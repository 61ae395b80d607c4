"""What the machines of a run have agreed on: the values of the keys `head`, `log/<iteration>` and `founded`."""

from __future__ import annotations

import dataclasses
import json
import struct

from torch_lowcomm import _C

_HEAD = struct.Struct("<qIHHH")  # iteration, asked, takeovers, the closer's place among the machines, their number
_OF_RECORD = 0xFFFF  # in place of a number: they are the record's, in its order


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
        """Eighteen bytes, the machines' numbers where they are not those of the record, then the record."""
        same = self.machines == _machines_of(self.record)
        count, named = (_OF_RECORD, ()) if same else (len(self.machines), self.machines)
        place = self.machines.index(self.closer)
        head = _HEAD.pack(self.iteration, self.asked, self.takeovers, place, count)
        return head + struct.pack(f"<{len(named)}Q", *named) + self.record

    @staticmethod
    def decode(value: bytes) -> Agreed:
        """Of what encode() returned. ValueError for anything else."""
        try:
            iteration, asked, takeovers, place, count = _HEAD.unpack_from(value)
            named = 0 if count == _OF_RECORD else count
            record = value[_HEAD.size + 8 * named :]
            machines = struct.unpack_from(f"<{named}Q", value, _HEAD.size) if named else _machines_of(record)
            return Agreed(iteration, record, machines, asked, machines[place], takeovers)
        except (struct.error, IndexError) as error:
            raise ValueError(f"seed replay: expected what machines agreed on, got {value[:80]!r}") from error


def _machines_of(record: bytes) -> tuple[int, ...]:
    """Those with a message in it, in its order; none where it is no record."""
    try:
        (told,) = _C.read_replay_records(record)
    except ValueError:
        return ()
    return tuple(told["machines"])


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
