"""The name of one memory of a cache."""

import re
from typing import NamedTuple


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

    @classmethod
    def parse(cls, text: str) -> "Slot":
        """The slot that str() has named so.

        Raises:
            ValueError: There is none.
        """
        match = re.fullmatch(r"(\d+)\.(\d+)\.(sent|received)", text)
        if match is None:
            raise ValueError(f"slot: expected 'boundary.position.sent' or 'boundary.position.received', got {text!r}")
        return cls(int(match[1]), int(match[2]), match[3] == "sent")
