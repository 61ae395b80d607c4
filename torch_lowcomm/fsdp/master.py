"""The quantized master copy: QSDP's Eq. 2, x_{t+1} = Q_w(x_t - lr·Q_g(g)) (arXiv 2302.02390)."""

from collections.abc import Callable, Sequence

import torch


def _checksum(flat: torch.Tensor) -> tuple[int, ...]:
    """Returns sums of the elements' bits as integers, plain and weighted by row and column. They are hardly ever the same
    after a write; the weights detect elements that have changed places. For a CUDA tensor it waits for the device.
    """
    bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
    whole = bits.numel() // 1024 * 1024
    table, tail = bits[:whole].view(-1, 1024), bits[whole:].long()
    rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    sums = [(part * torch.arange(1, part.numel() + 1, device=part.device)).sum() for part in (rows, columns, tail)]
    return tuple(int(part) for part in (*sums, rows.sum(), tail.sum()))


class QuantizedMaster:
    """Replaces a rank's shard by its decoded value, so that the optimizer starts from it.

    It does so at the first gather after the shard was written. Later gathers of the same weights must send the same codes.
    Encoding the decoded shard again would give other codes: a lattice's random shift would move it once more, and even a
    nearest grid's ends move by their last bits. So the encoded values are kept until the shard is written again, and are sent
    again; this takes one more copy of the shard. A checksum detects a write that no version shows (`p.data`, a local
    tensor), and the shard is then encoded as it is. `shards` returns each parameter's flat shard as it is now; `runs` are
    (parameter, first element, count) of the coded ones.
    """

    def __init__(self, shards: Callable[[], list[torch.Tensor]], runs: Sequence[tuple[int, int, int]]) -> None:
        self._shards = shards
        self._runs = list(runs)
        self._version: int | None = None  # version of the weights whose decoded values the shards are
        self._encoded: torch.Tensor | None = None
        self._decoded_sum: tuple[int, ...] = ()  # checksum of the shards as `settle` left them

    def holds_decoded_only(self, version: int) -> bool:
        """Whether the shard is decoded and the encoded values are gone, as after a checkpoint; it is then sent exactly."""
        return self.holds_decoded(version) and self._encoded is None

    def to_encode(self, version: int, flat: torch.Tensor) -> torch.Tensor:
        """Puts the values to encode into `flat` [n], which has the shards one after another, and returns a copy of them."""
        if self.holds_decoded(version) and self._encoded is not None and _checksum(flat) == self._decoded_sum:
            flat.copy_(self._encoded)
            return self._encoded
        return flat.clone()

    def settle(self, version: int, encoded: torch.Tensor, decoded: torch.Tensor) -> None:
        """Sets the shards to `decoded` [n], which every rank has decoded from the values `encoded` [n]."""
        if encoded is self._encoded:
            return
        shards = self._shards()
        for parameter, first, count in self._runs:
            shards[parameter].copy_(decoded[first : first + count])
        self._version, self._encoded, self._decoded_sum = version, encoded, _checksum(decoded)

    def holds_decoded(self, version: int) -> bool:
        """Whether the shard is the decoded value of a version."""
        return version == self._version

    def load(self, version: int | None) -> None:
        """Notes that shards are loaded from a checkpoint: decoded ones of a version, or, with None, not decoded ones."""
        self._version, self._encoded = version, None
