"""Checks the options of a StoreExchange."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store


def expect_options(
    store: Store,
    *,
    min_machines: int,
    deadline_factor: float,
    deadline_least_s: float,
    deadline_most_s: float,
    lost_after_s: float,
    chunk: int,
    snapshot_every: int,
    timeout: timedelta,
) -> None:
    """Checks types and numbers; the arguments are those of `StoreExchange`.

    Raises:
        TypeError: The store is no store.
        ValueError: A number is out of its range.
    """
    if not isinstance(store, Store):
        raise TypeError(f"seed replay: store: expected a torch.distributed.Store, got {type(store).__name__}")
    for name, count, at_least in (
        ("min_machines", min_machines, 1),
        ("chunk", chunk, 1),
        ("snapshot_every", snapshot_every, 0),
    ):
        if isinstance(count, bool) or not isinstance(count, int) or count < at_least:
            raise ValueError(f"seed replay: {name}: expected an integer of {at_least} or more, got {count!r}")
    if snapshot_every % chunk:
        raise ValueError(f"seed replay: snapshot_every: expected a multiple of chunk, {chunk}, got {snapshot_every}")
    for name, value in (
        ("deadline_factor", deadline_factor),
        ("deadline_least_s", deadline_least_s),
        ("lost_after_s", lost_after_s),
        ("timeout", timeout.total_seconds()),
    ):
        if not value > 0:
            raise ValueError(f"seed replay: {name}: expected a number above 0, got {value!r}")
    if not deadline_most_s >= deadline_least_s:
        raise ValueError(
            f"seed replay: deadline_most_s: expected deadline_least_s, {deadline_least_s!r}, or more, got "
            f"{deadline_most_s!r}"
        )
