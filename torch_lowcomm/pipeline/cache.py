"""The memory that the stages of one rank keep of each sample: m of AQ-SGD (Wang et al., NeurIPS 2022, section 3)."""

from typing import Any, NamedTuple

import torch

from torch_lowcomm import _C


class Slot(NamedTuple):
    """One tensor of one boundary, on one side of it.

    Attributes:
        boundary: The index of the stage before the boundary.
        position: The tensor's place among those that cross it.
        sends: Whether this rank has the stage before it.
    """

    boundary: int
    position: int
    sends: bool

    def __str__(self) -> str:
        return f"{self.boundary}.{self.position}.{'sent' if self.sends else 'received'}"


class Cache:
    """The memory of the stages of one rank, in RAM.

    A sample takes a slot at each boundary of the rank: N samples of [T, D] take N · T · D · 2 bytes in fp16, about
    N · T · D · b / 8 in a codec of b bits. Nothing else grows with the samples or the steps.

    Both sides of a boundary must remember the same. They compare at the first step of a schedule, and forget what differs: a
    rank without its cache, or with an older one, costs first visits and nothing else. A run that resumes with every rank's
    state_dict() goes on bit for bit.
    """

    def __init__(self, *, store: str = "fp16") -> None:
        """Makes an empty memory.

        Args:
            store: What slots are kept in: "fp16", "bf16", "fp32", or a codec, for example "sym8:axis=channel". A codec loses
                part of each memory, equally on both sides, and the next change makes up for it; the receiver computes on the
                sum before it is encoded (paper, section 3.1).

        Raises:
            ValueError: `store` is none of these, or a codec with a level table.
        """
        try:
            _C.check_slots(store)
        except ValueError as error:
            raise ValueError(f"store: expected 'fp32', 'fp16', 'bf16' or a codec, got {store!r} ({error})") from None
        self._store = store
        self._memories: dict[Slot, _C.SampleMemory] = {}
        self._channels: dict[Slot, int] = {}  # last dimensions, for codecs by channel
        self.loads = 0  # states taken over; schedules compare again after one

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return sum(memory.bytes for memory in self._memories.values())

    def memory(self, slot: Slot, elements: int, channels: int) -> _C.SampleMemory:
        """The memory of one tensor of one boundary, made where there is none.

        Args:
            slot: The tensor, boundary and side.
            elements: Of the tensor, for one sample.
            channels: Its last dimension.

        Raises:
            ValueError: There is one of another size, or the store's codec does not take such a tensor.
        """
        memory = self._memories.get(slot)
        if memory is None:
            memory = self._memories[slot] = _C.SampleMemory(elements, channels, self._store)
            self._channels[slot] = channels
        elif memory.elements != elements:
            raise ValueError(f"cache: boundary {slot}: expected {memory.elements} elements a sample, got {elements}")
        return memory

    def rows(self, boundary: int, sends: bool) -> torch.Tensor:
        """The slots of a boundary, to compare: int64 [slots, 4] of (position, sample, version, digest)."""
        rows = [
            (slot.position, *row)
            for slot, memory in sorted(self._memories.items())
            if slot.boundary == boundary and slot.sends == sends
            for row in memory.table()
        ]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 4)

    def keep_equal(self, boundary: int, sends: bool, theirs: torch.Tensor) -> int:
        """Forgets at a boundary each sample that the other side, whose rows() are given, has not alike.

        Returns:
            How many it forgot.
        """
        equal = set(map(tuple, theirs.tolist()))
        forgotten = 0
        for position, sample, version, digest in self.rows(boundary, sends).tolist():
            if (position, sample, version, digest) not in equal:
                self._memories[Slot(boundary, position, sends)].forget(sample)
                forgotten += 1
        return forgotten

    def state_dict(self) -> dict[str, Any]:
        """All slots: for each tensor of each boundary its samples, their versions, and slots as bytes."""
        state: dict[str, Any] = {"store": self._store}
        for slot, memory in self._memories.items():
            table = memory.table()
            state[str(slot)] = {
                "elements": memory.elements,
                "channels": self._channels[slot],
                "samples": torch.tensor([sample for sample, _, _ in table], dtype=torch.int64),
                "versions": torch.tensor([version for _, version, _ in table], dtype=torch.int64),
                "slots": torch.stack([memory.read(sample) for sample, _, _ in table]) if table else torch.empty(0),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what state_dict() returned, in place of what is remembered; on all ranks or on none.

        Raises:
            ValueError: The state is of another store.
        """
        if state["store"] != self._store:
            raise ValueError(f"cache: expected a state of store {self._store!r}, got {state['store']!r}")
        for memory in self._memories.values():  # which channels hold
            for sample, _, _ in memory.table():
                memory.forget(sample)
        self.loads += 1
        for name, entry in state.items():
            if name == "store":
                continue
            boundary, position, side = name.split(".")
            slot_of = Slot(int(boundary), int(position), side == "sent")
            memory = self.memory(slot_of, int(entry["elements"]), int(entry["channels"]))
            for sample, version, slot in zip(
                entry["samples"].tolist(), entry["versions"].tolist(), entry["slots"], strict=True
            ):
                memory.restore(sample, version, slot.contiguous())
