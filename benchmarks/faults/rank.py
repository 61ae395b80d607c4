"""One rank in one row: the undisturbed run, the op and the fault, and the group that is made afterwards."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from faults import cuts, differences, signals
from faults.cases import CUTS, DIFFERENCES, SIGNALS, Case
from faults.ops import Caller, PendingOp, options, same_bits
from faults.stage import Notes, enter

_PATIENCE_S = 40.0  # for what another rank says
_REFERENCE, _SPACER = "a", "b"  # the data of the op that fails, and of one between it and its undisturbed run
Rank = Any  # ranks.Rank, of the tests
_FAMILIES = {SIGNALS: signals.play, CUTS: cuts.play, DIFFERENCES: differences.play}


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
    """The facts that a rank saw, for judge.py, which alone knows what they should be; JSON by asdict()."""

    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    fault_at: float = 0.0
    resumed_at: float = 0.0
    premature: str = ""  # why the fault did not come when it should have
    went_on: str = ""  # of the group made afterwards: "equal" to the undisturbed run, "right", or what was wrong


class Player:
    """A rank of a row, which the faults see, and the run around it: the rank `r` itself says and hears notes. `notes` are those
    that the owner of the lab hears, None on loopback. The culprit commits the fault.
    """

    def __init__(self, r: Rank, case: Case, notes: Notes | None) -> None:
        self.r, self.case, self.notes = r, case, notes
        self.culprit = r.rank == case.culprit
        self.facts = Facts()
        self.caller = Caller(case.kind, r.rank, r.size)

    def play(self) -> Facts:
        """The row, from the group's making to the next group's end."""
        r, case = self.r, self.case
        r.say(f"pid{r.rank}", os.getpid())
        made_with = options(case.compressed)
        self.together("here")
        # The deadline that passes is short, and not for the making of a group on a busy machine.
        r.init("lowcomm", timeout_s=_PATIENCE_S, pg_options=made_with)
        self._undisturbed()
        r.set_deadline(case.deadline_s)
        next(play for faults, play in _FAMILIES.items() if case.fault in faults)(self)
        self._go_on()
        return self.facts

    # ---- ranks talk by notes, not by the group that is about to break ----

    def hear(self, what: str) -> str:
        """Waits for a note and returns its text."""
        return self.r.hear(what, _PATIENCE_S)

    def together(self, what: str) -> None:
        """A barrier."""
        self.r.say(f"{what}{self.r.rank}")
        for rank in range(self.r.size):
            self.hear(f"{what}{rank}")

    def hear_others(self, what: str) -> None:
        """Waits until all but the faulty rank have said it."""
        for rank in range(self.r.size):
            if rank != self.case.culprit:
                self.hear(f"{what}{rank}")

    # ---- ops ----

    def attempt(self, *, odd: str = "", issued: Callable[[PendingOp], None] | None = None) -> bool:
        """The op with the undisturbed one's data; notes how it ended. Whether it was done. `odd` says how this rank's call
        differs from the others'; `issued` is called between the call and the wait.
        """
        attempt = Attempt(time.monotonic())
        self.facts.attempts.append(attempt)
        op: PendingOp | None = None
        try:
            op = self.caller.issue(self.case.op, _REFERENCE, odd=odd)
            if issued:
                issued(op)
            op.wait()
        except (RuntimeError, ValueError, TypeError) as error:
            attempt.ended = time.monotonic()
            attempt.error, attempt.message = type(error).__name__, str(error)
        else:
            attempt.ended = time.monotonic()
            attempt.equal = same_bits(op.outputs, self.reference)
        if op and op.residual:
            now = op.residual.value
            kept = torch.equal(now, op.residual_before)
            # Another op than the row's may be lent one where the undisturbed run had none.
            committed = self.residual_after is not None and torch.equal(now, self.residual_after)
            attempt.residual = "kept" if kept else "committed" if committed else "changed"
        return not attempt.error

    def attempts(self, **first: Any) -> None:
        """The op, and others after it until one fails."""
        if self.attempt(**first):
            self.attempts_left()

    def attempts_left(self) -> None:
        """Others after the first."""
        while len(self.facts.attempts) < self.case.attempts and self.attempt():
            pass

    def _undisturbed(self) -> None:
        """Runs the op undisturbed, for the result to expect; then another, so that no buffer holds that result."""
        for key in (_REFERENCE, _SPACER):
            issued = self.caller.issue(self.case.op, key)
            issued.wait()
            if key == _REFERENCE:
                self.reference = issued.outputs
                self.residual_after = issued.residual.value.clone() if issued.residual else None
            self.together("through " + key)
        if not self.caller.right(self.case.op, _REFERENCE, self.reference):
            raise AssertionError(f"{self.case.op} undisturbed: expected what exact arithmetic gives or near it")

    # ---- afterwards ----

    def _go_on(self) -> None:
        """The group is aborted and another one made of the ranks that live: it must work, and give the same bits."""
        case = self.case
        if any(attempt.error for attempt in self.facts.attempts):
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        dist.destroy_process_group()
        again = dataclasses.replace(self.r, size=case.survivors, stores=10)
        again.init("lowcomm", timeout_s=60, pg_options=options(case.compressed))
        self.facts.went_on = self._next_group(Caller(case.kind, self.r.rank, case.survivors))
        dist.barrier()
        dist.destroy_process_group()

    def _next_group(self, caller: Caller) -> str:
        op = self.case.op
        if caller.size == 1 and op == "send/recv":
            return "right"  # the group is there; there is nobody to talk to
        issued = caller.issue(op, _REFERENCE)
        issued.wait()
        if caller.size == self.r.size:
            return "equal" if same_bits(issued.outputs, self.reference) else "its result was another"
        return "right" if caller.right(op, _REFERENCE, issued.outputs) else "its result was wrong"


def play(r: Rank, case: Case, notes: Notes | None) -> dict[str, Any]:
    """A rank of the row, in a process of its own; facts as a dict."""
    if notes:
        enter(notes.namespaces[r.rank])
        os.environ["LOWCOMM_SOCKET_IFNAME"] = "eth0"
    return dataclasses.asdict(Player(r, case, notes).play())
