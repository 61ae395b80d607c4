"""The facts that a rank saw in a row, for `judge.py`, which alone knows what they should be."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Attempt:
    """One op of a rank's: when it was called and ended (CLOCK_MONOTONIC, in seconds), and how."""

    called: float
    ended: float = 0.0
    error: str = ""  # the exception's type
    message: str = ""
    equal: bool | None = None  # to the undisturbed run; None where it failed
    residual: str = ""  # "kept": as before the op; "committed": as after the undisturbed one; "changed"; "" without one


@dataclasses.dataclass
class Facts:
    """The facts that a rank saw; JSON by asdict()."""

    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    fault_at: float = 0.0
    resumed_at: float = 0.0
    frames: int = 0  # of one op to the peer that gets most, on a rank whose frames are passed on
    premature: str = ""  # why the fault did not come when it should have
    went_on: str = ""  # of the group made afterwards: "equal" to the undisturbed run, "right", or what was wrong
