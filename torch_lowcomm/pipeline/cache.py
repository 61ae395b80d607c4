"""The memory that the stages of one rank keep of each sample: m of AQ-SGD (Wang et al., NeurIPS 2022, section 3)."""

import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm._copies import NotCopied
from torch_lowcomm._log import logger
from torch_lowcomm.pipeline.slots import Slot, Slots


class Cache(NotCopied):
    """The memory of the stages of one rank, in RAM or in files.

    A sample takes a slot at each boundary of the rank: N samples of [T, D] take N · T · D · 2 bytes in fp16, about
    N · T · D · b / 8 in a codec of b bits. Nothing else grows with the samples or the steps.

    Both sides of a boundary must remember the same. They compare at the first step of a schedule, and forget what differs: a
    rank without its cache, or with an older one, costs first visits and nothing else. A run that resumes with every rank's
    files, or with every rank's state_dict() of a cache with state=True, goes on bit for bit.
    """

    def __init__(
        self,
        *,
        store: str = "fp16",
        folder: str | os.PathLike[str] | None = None,
        run: str = "",
        max_bytes: int | None = None,
        overflow: str | None = "stateless",
        state: bool = False,
    ) -> None:
        """Makes a memory: empty, or with the slots that are in `folder`.

        All ranks are given the same options, but each a folder of its own.

        Args:
            store: What slots are kept in: "fp16", "bf16", "fp32", or a codec, for example "sym8:bucket=128". A codec loses
                part of each memory, equally on both sides, and the next change makes up for it; the receiver computes on the
                sum before it is encoded (paper, section 3.1).
            folder: Where slots are kept, a sparse file for each tensor, boundary and side; made where it does not exist. None: in
                RAM.
            run: A name of the run, which its files carry: files of another run are refused.
            max_bytes: What the slots of one tensor at one boundary may take on a rank, index and header of a file not counted.
                None: no bound.
            overflow: How samples that do not fit travel, by themselves. "stateless": in the stage's forward codec. A codec: in
                this one. None: exact.
            state: Whether state_dict() holds the slots, which are in RAM.

        Raises:
            ValueError: `store` or `overflow` is none of these, max_bytes is below 1, `state` is asked of files, or a file of the
                folder is of another run, store, machine or format, or is cut or damaged in its header.
            OSError: The folder, or a file of it, cannot be made, read or written, or another cache has it open.
        """
        try:
            _C.check_slots(store)
        except ValueError as error:
            raise ValueError(f"store: expected 'fp32', 'fp16', 'bf16' or a codec, got {store!r} ({error})") from None
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes: expected 1 or more, got {max_bytes}")
        if overflow not in ("stateless", None):
            _C.Codec(overflow)
        if state and folder is not None:
            raise ValueError("state: expected False with a folder, whose files are found again by themselves, got True")
        self._store, self._state, self._max_bytes, self._overflow = store, state, max_bytes, overflow
        self.slots = Slots(store, None if folder is None else Path(folder), run, max_bytes)
        self.loads = 0  # states taken over; schedules compare again after one

    @property
    def options(self) -> str:
        """The options that both sides of a boundary must be given equal."""
        return f"store={self._store}, max_bytes={self._max_bytes}, overflow={self._overflow}"

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return sum(memory.bytes for _, memory, _ in self.slots.all())

    def overflow_codec(self, forward: str) -> str:
        """The codec of samples without room at a stage with this forward codec; "" if exact."""
        return forward if self._overflow == "stateless" else self._overflow or ""

    def stats(self) -> dict[str, Any]:
        """What the memories hold, and what happened to samples since this cache was made, over all boundaries of the rank.

        Returns:
            "slots" and "bytes" that are in use; "seen", "first" and "overflow": samples of messages that travelled as changes,
            for the first time (or again, forgotten in between), and without a slot for want of room; "forgotten": by reason the
            slots that were forgotten: "differs" from the other side's, "damaged" in its file, "cut_off" while it was written,
            "not_written" to a file that refused it. Of slots in files "read_ahead" were in RAM when a message needed them, and
            "read_late" were not.
        """
        names = ("seen", "first", "overflow", "read_ahead", "read_late")
        total: dict[str, Any] = {"slots": 0, "bytes": self.bytes, **dict.fromkeys(names, 0), "forgotten": {}}
        for _, memory, _ in self.slots.all():
            counts = memory.counts
            total["slots"] += memory.bytes // memory.slot_bytes
            for name in names:
                total[name] += counts[name]
            for why, slots in counts["forgotten"].items():
                total["forgotten"][why] = total["forgotten"].get(why, 0) + slots
        return total

    def read_ahead(self, samples: Sequence[int] | torch.Tensor) -> None:
        """Has the slots of the next batch read from their files while this one computes; in RAM it does nothing.

        `lc.pipeline.batches(cache=)` calls this. A slot that the present batch has yet to write is not read before. The slots of
        the last two calls are kept in RAM. A file that cannot be read fails the next step.
        """
        numbers = list_of(samples)
        for _, memory, _ in self.slots.all():
            memory.read_ahead(numbers)

    def flush(self) -> None:
        """Returns when all slots are on their disk; raises OSError where one could not be written."""
        for error in self.slots.each(_C.SampleMemory.flush):
            raise error

    def recover(self) -> None:
        """Waits for the writes of a step that failed. Slots that cannot be written are forgotten and counted in stats(), and
        none of these writes is an error of the next step.
        """
        self.slots.each(_C.SampleMemory.flush)

    def close(self) -> None:
        """Flushes and lets the files go, so that another cache may open them; this one can then no longer be used.
        Idempotent. Raises OSError where a slot could not be written.
        """
        self.slots.close()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this rank, under one key with the rank's number.

        With state=True that is all slots: for each tensor of each boundary its samples, their versions, and slots as bytes. Else
        it is the store, the folder and a digest of the slots. `torch.distributed.checkpoint` takes the cache itself; ranks may
        have different slots, and as many of them as they like.
        """
        digest, entries = 0, {}
        for slot, memory, shape in self.slots.all():
            table = memory.table()
            digest = zlib.crc32(repr((str(slot), table)).encode(), digest)
            if self._state:
                entries[str(slot)] = {
                    "elements": memory.elements,
                    "shape": shape,
                    "samples": torch.tensor([sample for sample, _, _ in table], dtype=torch.int64),
                    "versions": torch.tensor([version for _, version, _ in table], dtype=torch.int64),
                    "slots": torch.stack([memory.read(sample) for sample, _, _ in table]) if table else torch.empty(0),
                }
        # A tuple is one value to torch.distributed.checkpoint, of any content: tensors would have to have the sizes of a cache
        # that is empty when it is loaded.
        return {_rank_key(): (self._store, str(self.slots.folder or ""), digest, entries)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the slots of a state in place of those remembered; on all ranks or on none.

        A state without slots changes nothing: what is remembered, in RAM or in files, need not be of the checkpoint's step. The
        next step compares both sides in every case.

        Raises:
            ValueError: The state is of another rank, or of another store: nothing has changed. Or its slots exceed max_bytes:
                then some of them are remembered, and nothing else.
        """
        if _rank_key() not in state:
            raise ValueError(f"cache: expected a state of {_rank_key()}, got one of {', '.join(state) or 'none'}")
        store, folder, digest, entries = state[_rank_key()]
        if store != self._store:
            raise ValueError(f"cache: expected a state of store {self._store!r}, got {store!r}")
        if old := next((name for name, entry in entries.items() if "shape" not in entry), None):
            raise ValueError(
                f"cache: boundary {old}: expected a state with the shape of its slots, got one of an older version"
            )
        self.loads += 1
        if not entries:
            mine = self.state_dict()[_rank_key()][2] if folder else digest
            if mine != digest:
                logger.info("cache: the slots in %s are not those of the checkpoint; both sides will compare", folder)
            return
        for _, memory, _ in self.slots.all():  # which channels hold
            for sample, _, _ in memory.table():
                memory.forget(sample)
        for name, entry in entries.items():
            memory = self.slots.memory(Slot.parse(name), int(entry["elements"]), *map(int, entry["shape"]))
            for sample, version, slot in zip(
                entry["samples"].tolist(), entry["versions"].tolist(), entry["slots"], strict=True
            ):
                memory.restore(sample, version, slot.contiguous())


def expect_cache(cache: object, forward: str | None) -> None:
    """Raises TypeError where a caller's `cache` is none, and ValueError where `forward` codes no changes for it."""
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(f"cache: expected an lc.pipeline.Cache, got {cache!r}")
    if cache is not None and forward in (None, "none"):
        raise ValueError(f"forward: expected a codec of changes with a cache, got {forward}")


def list_of(samples: Iterable[int] | torch.Tensor) -> list[int]:
    """Numbers of samples; those of a tensor on a device take one copy."""
    return [int(sample) for sample in (samples.tolist() if isinstance(samples, torch.Tensor) else samples)]


def _rank_key() -> str:
    return f"rank{dist.get_rank() if dist.is_initialized() else 0}"
