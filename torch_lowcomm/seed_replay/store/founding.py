"""How a run begins at a store (PROTOCOL.md, "Founding")."""

from __future__ import annotations

import dataclasses
import json
import time

from torch_lowcomm import _C
from torch_lowcomm.seed_replay.store.commit import Commit
from torch_lowcomm.seed_replay.store.run import JoinRequest, Run

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0  # between looks at the machines that have come since; doubles


@dataclasses.dataclass(frozen=True)
class Founding:
    """How a run began at this store: the value of the key `founded`. The fields are the names in its JSON."""

    iteration: int  # the first that is committed here; above 0 where a run goes on at a new store
    checksum: int  # of the weights before it
    machines: tuple[int, ...]  # those that take part in it, ascending
    asked: int  # join requests that the founding answers
    source: int  # the machine whose records of earlier iterations are at the store
    earlier: bool  # whether there are such records

    def encode(self) -> bytes:
        """Returns the founding as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def decode(value: bytes) -> Founding:
        """Reads what `encode` returned."""
        told = json.loads(value)
        return Founding(**{**told, "machines": tuple(told["machines"])})

    def commit(self) -> Commit:
        """Returns the first value of `head`, which any machine may set."""
        return Commit(self.iteration - 1, b"", self.machines, self.asked, self.source)


def found(run: Run, core: _C.SeedReplay, *, min_machines: int, timeout_s: float) -> Founding:
    """Returns how the run at this store began; machines that come to an empty store agree on it first. Each puts its log, if
    it has one, and a join request with its iteration and checksum. When `min_machines` living ones have, one of them writes
    the founding by `compare_set`: the run begins at the latest iteration that one comes with, and those that are behind replay
    its log. Too few machines for `timeout_s` are a TimeoutError.
    """
    store, machine = run.store, run.machine
    value = store.find("founded")
    if value is not None:
        return Founding.decode(value)
    log: bytes = core.log
    if log:
        store.put_large(f"earlier/{machine}", log, first=_C.ReplayRecords(log).first_iteration)
    run.ask(core.iteration, checksum=core.checksum(), earlier=len(log))
    deadline, wait_s, seen = time.monotonic() + timeout_s, _FIRST_WAIT_S, 0
    all_requests: list[JoinRequest] = []
    while value is None:
        count = int(store.find("asks") or 0)
        all_requests += run.requests(seen + 1, count)
        seen = count
        there = {request.machine: request for request in all_requests if request.name in run.beat.alive()}
        if len(there) >= min_machines:
            value = store.set_first("founded", _proposal(list(there.values()), count).encode())
            break
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"SeedReplay: expected {min_machines} machines or more to begin with, got "
                f"{sorted(request.name for request in there.values())} in {timeout_s:g} s"
            )
        value = store.wait_for("founded", wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    founding = Founding.decode(value)
    if log and founding.source != machine:
        store.delete_large_later(f"earlier/{machine}", len(log))
    return founding


def _proposal(there: list[JoinRequest], count: int) -> Founding:
    """Returns a founding with the latest weights; the source is the machine with the longest log that has them."""
    source = max(there, key=lambda request: (request.iteration, request.earlier))
    fitting = [r for r in there if r.iteration < source.iteration or r.checksum == source.checksum]
    machines = tuple(sorted(request.machine for request in fitting))
    return Founding(source.iteration, source.checksum, machines, count, source.machine, source.earlier > 0)
