"""The memory that the stages of one rank keep of each sample: m of AQ-SGD (Wang et al., NeurIPS 2022, section 3)."""

from typing import Any, NamedTuple

import torch

from torch_lowcomm import _C

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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

    A sample takes `elements · bytes` at each boundary of the rank, where elements are those of its activation: for N samples of
    [T, D] in fp16 N · T · D · 2 bytes. Nothing else grows with the samples or the steps.

    Both sides of a boundary must remember the same. They compare at the first step of a schedule, and forget what differs: a
    rank without its cache, or with an older one, costs first visits and nothing else. A run that resumes with every rank's
    state_dict() goes on bit for bit.
    """

    def __init__(self, *, store: str = "fp16") -> None:
        """Makes an empty memory.

        Args:
            store: What slots are kept in: "fp16", "bf16" or "fp32".

        Raises:
            ValueError: `store` is none of these.
        """
        if store not in _TYPES:
            raise ValueError(f"store: expected one of {', '.join(_TYPES)}, got {store!r}")
        self._store = store
        self._memories: dict[Slot, _C.SampleMemory] = {}
        self.loads = 0  # states taken over; schedules compare again after one

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return sum(memory.bytes for memory in self._memories.values())

    def memory(self, slot: Slot, elements: int) -> _C.SampleMemory:
        """The memory of one tensor of one boundary, of `elements` numbers a sample; made where there is none.

        Raises:
            ValueError: There is one of another size.
        """
        memory = self._memories.get(slot)
        if memory is None:
            memory = self._memories[slot] = _C.SampleMemory(elements, _TYPES[self._store])
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
            memory = self.memory(Slot(int(boundary), int(position), side == "sent"), int(entry["elements"]))
            for sample, version, slot in zip(
                entry["samples"].tolist(), entry["versions"].tolist(), entry["slots"], strict=True
            ):
                memory.restore(sample, version, slot.contiguous())
