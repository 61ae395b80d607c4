"""The commit of one iteration: the value of the keys `head` and `log/<iteration>`."""

from __future__ import annotations

import dataclasses
import struct

from torch_lowcomm import _C

_HEAD = struct.Struct("<qIHHH")  # iteration, answered, epoch, the leader's place in the quorum, the quorum's size
_OF_RECORD = 0xFFFF  # in place of the size: the quorum is the machines of the record, in its order


@dataclasses.dataclass(frozen=True)
class Commit:
    """The outcome of one iteration. It is written once, and all machines read the same."""

    iteration: int  # of the record; before the first record, one less than the run's first iteration
    record: bytes  # that all machines apply (`_C.SeedReplay.record`); b"" before the first record
    quorum: tuple[int, ...]  # machines of the next iteration; the one that has taken part for longest comes first
    answered: int  # join requests whose machine is in a quorum, or asks again
    leader: int  # the machine that wrote this commit
    epoch: int = 0  # how often the next iteration's quorum was replaced because all of its machines were gone

    def encode(self) -> bytes:
        """Returns eighteen bytes, the quorum where it is not the record's machines, and the record."""
        same = self.quorum == _machines_of(self.record)
        size, named = (_OF_RECORD, ()) if same else (len(self.quorum), self.quorum)
        place = self.quorum.index(self.leader)
        head = _HEAD.pack(self.iteration, self.answered, self.epoch, place, size)
        return head + struct.pack(f"<{len(named)}Q", *named) + self.record

    @staticmethod
    def decode(value: bytes) -> Commit:
        """Reads what `encode` returned; ValueError where it is something else."""
        try:
            iteration, answered, epoch, place, size = _HEAD.unpack_from(value)
            named = 0 if size == _OF_RECORD else size
            record = value[_HEAD.size + 8 * named :]
            quorum = struct.unpack_from(f"<{named}Q", value, _HEAD.size) if named else _machines_of(record)
            return Commit(iteration, record, quorum, answered, quorum[place], epoch)
        except (struct.error, IndexError) as error:
            raise ValueError(f"SeedReplay: expected what machines agreed on, got {value[:80]!r}") from error


def _machines_of(record: bytes) -> tuple[int, ...]:
    """Machines with a message in a record, in its order; none where the bytes are no record."""
    try:
        (told,) = _C.read_replay_records(record)
    except ValueError:
        return ()
    return tuple(told["machines"])
