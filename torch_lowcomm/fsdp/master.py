"""The quantized master copy: QSDP's Eq. 2, x_{t+1} = Q_w(x_t - lr·Q_g(g)) (arXiv 2302.02390)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def _checksum(flat: torch.Tensor) -> tuple[int, ...]:
    """Sums of the elements' bits as integers, plain and weighted by row and column: hardly ever the same after a write.

    The weights tell elements that have changed places. Of CUDA tensors it waits for the device.
    """
    bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
    whole = bits.numel() // 1024 * 1024
    table, tail = bits[:whole].view(-1, 1024), bits[whole:].long()
    rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    sums = [(part * torch.arange(1, part.numel() + 1, device=part.device)).sum() for part in (rows, columns, tail)]
    return tuple(int(part) for part in (*sums, rows.sum(), tail.sum()))


class QuantizedMaster:
    """Puts what a rank's shard was decoded to in the shard's place, so that the optimizer starts from it.

    It does so at the first gather after the shard was written. Later gathers of the same weights must send the same codes,
    and encoding the decoded shard again would not: a lattice's random shift would move it once more, and even a nearest
    grid's ends move by their last bits. So what was encoded is kept until the shard is written again, and sent again: one
    more copy of the shard while the step lasts. A write that no version shows (`p.data`, a local tensor) is found by a
    checksum, and encoded as it is.
    """

    def __init__(self, shards: Callable[[], list[torch.Tensor]], runs: Sequence[tuple[int, int, int]]) -> None:
        """`shards`: each parameter's flat shard as it is now. `runs`: (parameter, first element, count) of coded ones."""
        self._shards = shards
        self._runs = list(runs)
        self._version: int | None = None  # of the weights whose decoded values the shards are
        self._encoded: torch.Tensor | None = None
        self._decoded_sum: tuple[int, ...] = ()  # of the shards as they were left

    def holds_decoded_only(self, version: int) -> bool:
        """Whether the shard is decoded and what it was decoded from is gone, as after a checkpoint: it travels exact."""
        return self.holds_decoded(version) and self._encoded is None

    def to_encode(self, version: int, flat: torch.Tensor) -> torch.Tensor:
        """Put into `flat` [n], the shards one after another, what is to be encoded, and return it as a copy."""
        if self.holds_decoded(version) and self._encoded is not None and _checksum(flat) == self._decoded_sum:
            flat.copy_(self._encoded)
            return self._encoded
        return flat.clone()

    def settle(self, version: int, encoded: torch.Tensor, decoded: torch.Tensor) -> None:
        """`encoded` was sent and every rank has `decoded` [n] of it: the shards become that."""
        if encoded is self._encoded:
            return
        shards = self._shards()
        for parameter, first, count in self._runs:
            shards[parameter].copy_(decoded[first : first + count])
        self._version, self._encoded, self._decoded_sum = version, encoded, _checksum(decoded)

    def holds_decoded(self, version: int) -> bool:
        """Whether the shard is that version's decoded value."""
        return version == self._version

    def load(self, version: int | None) -> None:
        """A checkpoint's shards are being loaded: decoded ones of that version, or not decoded since they were written."""
        self._version, self._encoded = version, None
