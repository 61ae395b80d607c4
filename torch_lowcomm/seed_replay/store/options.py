"""The options of a StoreExchange: names, defaults and meanings in one table, and their checks."""

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

from torch_lowcomm._option_table import OptionTable, at_least, option

_POSITIVE = "a number above 0", lambda value: value > 0


@dataclasses.dataclass(frozen=True)
class StoreExchangeOptions(OptionTable):
    """How machines at a store meet. `StoreExchange` takes these fields as keyword arguments.

    Attributes:
        min_machines: The least number of machines with which a run begins.
        deadline_factor: How long a machine waits for the others' messages, in average iterations.
        deadline_least_s: The least such wait in seconds.
        deadline_most_s: The longest such wait in seconds, which also holds until an iteration has been measured.
        lost_after_s: Seconds of silence at the store after which a machine is gone; another process may take its id then.
        chunk: Number of iterations whose records are packed into one value; equal on all machines.
        snapshot_every: Iterations from one snapshot of the weights to the next, a multiple of `chunk`; equal on all machines.
            The logs, that of the store and `core.log`, lose what is before the last snapshot but one. 0: no snapshots, and
            whole logs.
        snapshots: A folder that all machines share, for snapshots; None: they go through the store, in a machine's memory.
        resync: Whether a machine takes a snapshot if its weights turn out to differ from the run's, in place of raising.
        timeout: How long the store may take for an answer, and how long to wait for machines to begin with or to be let in.
    """

    owner: ClassVar[str] = "SeedReplay"

    min_machines: int = at_least(1, 1)
    deadline_factor: float = option(4.0, *_POSITIVE)
    deadline_least_s: float = option(5.0, *_POSITIVE)
    deadline_most_s: float = 300.0
    lost_after_s: float = option(10.0, *_POSITIVE)
    chunk: int = at_least(256, 1)
    snapshot_every: int = at_least(0, 0)
    snapshots: str | Path | None = None
    resync: bool = False
    timeout: timedelta = option(timedelta(minutes=5), "a time above 0", lambda time: time > timedelta())  # noqa: RUF009

    @property
    def timeout_s(self) -> float:
        """`timeout` in seconds."""
        return self.timeout.total_seconds()

    def expect(self) -> None:
        """Raises ValueError where a number is out of its range."""
        self.expect_in_range()
        if self.snapshot_every % self.chunk:
            raise ValueError(
                f"SeedReplay: snapshot_every: expected a multiple of chunk, {self.chunk}, got {self.snapshot_every}"
            )
        if not self.deadline_most_s >= self.deadline_least_s:
            raise ValueError(
                f"SeedReplay: deadline_most_s: expected deadline_least_s, {self.deadline_least_s!r}, or more, got "
                f"{self.deadline_most_s!r}"
            )
