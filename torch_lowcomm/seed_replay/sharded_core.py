"""The core of one rank's shards, where FSDP2 has sharded a machine's weights over several ranks."""

from collections.abc import Sequence
from typing import Any

from torch_lowcomm import _C
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks
from torch_lowcomm.seed_replay.shards import Entry


class ShardedCore:
    """The core of one rank's shards, with the checksum of the whole weights; all else is the core's own.

    Args:
        core: The core of this rank's shards.
        ranks: The machine's ranks.
        own: This rank's shards.
    """

    def __init__(self, core: _C.SeedReplay, ranks: MachineRanks, own: Sequence[Entry]) -> None:
        self._core, self._ranks = core, ranks
        self._pieces = [(first * shard.element_size(), shard.nbytes) for _, shard, _, first in own]

    def __getattr__(self, name: str) -> Any:
        """The core's attribute."""
        return getattr(self._core, name)

    @property
    def iteration(self) -> int:
        """The iteration that comes next."""
        return self._core.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._core.iteration = value

    def checksum(self) -> int:
        """Returns the CRC-32C of the whole weights, as an unsharded machine has it. Collective of the machine.

        Raises:
            RuntimeError: Ranks that have the same part of a parameter have different values in it.
        """
        mine = [(*piece, crc) for piece, crc in zip(self._pieces, self._core.checksums(), strict=True)]
        whole = 0
        for number, pieces in enumerate(zip(*self._ranks.gather(mine), strict=True)):
            found: dict[int, tuple[int, int, int]] = {}  # by first byte: bytes, CRC, rank
            for rank, (first, size, crc) in zip(self._ranks.ranks, pieces, strict=True):
                if size and found.setdefault(first, (size, crc, rank))[:2] != (size, crc):
                    raise RuntimeError(
                        f"SeedReplay: iteration {self.iteration}: expected equal weights in parameter {number}, got CRC-32C "
                        f"{found[first][1]:08x} on rank {found[first][2]} and {crc:08x} on rank {rank} of one machine"
                    )
            for _, (size, crc, _) in sorted(found.items()):
                whole = _C.joined_crc32c(whole, crc, size)
        return whole
