"""What one rank does in a row, and what it saw: facts for `judge.py`, which alone knows what they should be."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from faults import tap
from faults.cases import CUTS, DIFFERENCES, FRAMES, SIGNALS, Case
from faults.ops import Caller, Issued, options, same_bits

Rank = Any  # ranks.Rank, of the tests
_CLONE_NEWNET = 0x40000000
_PEER_PATIENCE_S = 40.0
_REFERENCE, _SPACER = "a", "b"  # the data of the op that fails, and of one between it and its undisturbed run
SHORT_CUT_S = 0.5


@dataclasses.dataclass
class Attempt:
    """One op of this rank's: when it was called and ended (CLOCK_MONOTONIC), and how."""

    called: float
    ended: float = 0.0
    error: str = ""
    message: str = ""
    equal: bool | None = None  # to the undisturbed run; None where it failed
    residual: str = ""  # "kept": as before the op; "committed": as after the undisturbed one; "changed"; "" without one


@dataclasses.dataclass
class Facts:
    """What a rank saw. Picklable, and JSON by asdict()."""

    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    fault_at: float = 0.0  # on the rank that knows when
    resumed_at: float = 0.0
    frames: int = 0  # to the peer that gets most, of one op
    premature: str = ""  # why the fault did not come when it should have
    went_on: str = ""  # "equal", "right" or what was wrong in the group made afterwards


class Links:
    """The lab as a rank knows it: notes in a folder that the lab's owner answers."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def ask(self, what: str) -> None:
        """`cut` or `restore` of the faulty rank's host; returns when it is done."""
        (self._folder / what).touch()
        end = time.monotonic() + _PEER_PATIENCE_S
        while not (self._folder / f"{what}.done").exists():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: expected the lab to do it within {_PEER_PATIENCE_S} s")
            time.sleep(0.002)


@dataclasses.dataclass
class Home:
    """Where a rank lives in a lab."""

    namespaces: list[str]
    folder: str

    def enter(self, rank: int) -> None:
        """Moves this thread, and all that it starts, to its host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/var/run/netns/{self.namespaces[rank]}").open() as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def _interface_bytes() -> int:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            fields = numbers.split()
            return int(fields[0]) + int(fields[8])
    raise RuntimeError("expected an interface eth0")


class Player:
    """One rank in one row."""

    def __init__(self, r: Rank, case: Case, home: Home | None) -> None:
        self.r, self.case = r, case
        self.culprit = r.rank == case.culprit
        self.others = [q for q in range(r.size) if q != case.culprit]
        self.facts = Facts()
        self.caller = Caller(case.kind, r.rank, r.size)
        self.links = Links(home.folder) if home else None

    def play(self) -> Facts:
        """The row, from the group's making to the next group."""
        r, case = self.r, self.case
        self.tap = tap.Tap(r.rank, r.size) if self.culprit and case.tapped else None
        r.say(f"pid{r.rank}", os.getpid())
        if self.tap:
            with self.tap.installed():
                r.init("lowcomm", timeout_s=case.deadline_s, pg_options=options(case))
        else:
            r.init("lowcomm", timeout_s=case.deadline_s, pg_options=options(case))
        self._undisturbed()
        family = next(f for f in (SIGNALS, CUTS, FRAMES, DIFFERENCES) if case.fault in f)
        {SIGNALS: self._signal, CUTS: self._cut, FRAMES: self._frame, DIFFERENCES: self._difference}[family]()
        self._go_on()
        return self.facts

    # ---- ops ----

    def _undisturbed(self) -> None:
        """What the op gives where nothing happens; then another, so that no buffer holds what is to come."""
        for key in (_REFERENCE, _SPACER):
            if self.tap:
                self.tap.count()
            issued = self.caller.issue(self.case.op, key)
            issued.wait()
            if key == _REFERENCE:
                self.reference = issued.outputs
                self.residual_after = issued.residual.value.clone() if issued.residual else None
            if self.case.tapped:
                self._together("through " + key)  # all frames of it have been passed on
            if self.tap:
                self.frame_counts = self.tap.count()
                self.facts.frames = max(self.frame_counts.values())
        if not self.caller.right(self.case.op, _REFERENCE, self.reference):
            raise AssertionError(f"{self.case.op} undisturbed: expected what exact arithmetic gives or near it")
        self._together("ready")

    def _together(self, what: str) -> None:
        self.r.say(f"{what}{self.r.rank}")
        for q in range(self.r.size):
            self.r.hear(f"{what}{q}", _PEER_PATIENCE_S)

    def _hear_others(self, what: str) -> None:
        for q in self.others:
            self.r.hear(f"{what}{q}", _PEER_PATIENCE_S)

    def _attempt(self, *, odd: str = "", issued: Callable[[Issued], None] = lambda _: None) -> bool:
        """The op with the undisturbed one's data; notes how it ended. Whether it was done."""
        attempt = Attempt(time.monotonic())
        self.facts.attempts.append(attempt)
        op: Issued | None = None
        try:
            op = self.caller.issue(self.case.op, _REFERENCE, odd=odd)
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
            kept, committed = torch.equal(now, op.residual_before), torch.equal(now, self.residual_after)
            attempt.residual = "kept" if kept else "committed" if committed else "changed"
        return not attempt.error

    def _attempts(self, **first: Any) -> None:
        """The op, and others after it until one fails."""
        if self._attempt(**first):
            self._attempts_left()
        self.r.say(f"over{self.r.rank}")

    def _attempts_left(self) -> None:
        while len(self.facts.attempts) < self.case.attempts and self._attempt():
            pass

    # ---- faults ----

    def _strike(self) -> None:
        """This process is killed or stopped, here."""
        self.facts.fault_at = time.monotonic()
        self.r.say("fault", self.facts.fault_at)
        os.kill(os.getpid(), signal.SIGKILL if self.case.fault == "kill -9" else signal.SIGSTOP)
        self.facts.resumed_at = time.monotonic()

    def _signal(self) -> None:
        (self._struck if self.culprit else self._witness)()

    def _struck(self) -> None:
        when = self.case.when
        if when == "before":
            self._hear_others("in")
            time.sleep(0.05)
            self._strike()
            self._attempts()
        elif when == "after":
            self._attempt()
            self._strike()
            self._attempts_left()
        elif self.tap:

            def act(frame: tap.Frame) -> list[tap.Frame]:
                self._strike()
                return [frame]

            self.tap.arm(self.frame_counts, when, act)
            self._together("armed")
            self._attempts()
        else:

            def begun(op: Issued) -> None:
                time.sleep(0.1)
                if op.completed():
                    self.facts.premature = "its part was over although rank 0 had not come"
                self._strike()

            self._attempts(issued=begun)

    def _witness(self) -> None:
        r, case = self.r, self.case
        if case.tapped:
            self._together("armed")
        elif case.when == "during" and r.rank == 0:
            r.hear("fault", _PEER_PATIENCE_S)
        if case.when == "after":
            if self._attempt():
                r.hear("fault", _PEER_PATIENCE_S)
                self._attempts_left()
            r.say(f"over{r.rank}")
        else:
            self._attempts(issued=lambda _: r.say(f"in{r.rank}"))
        self.facts.fault_at = float(r.hear("fault", _PEER_PATIENCE_S))
        if case.fault == "SIGSTOP" and r.rank == 0:
            self._hear_others("over")
            os.kill(int(r.hear(f"pid{case.culprit}")), signal.SIGCONT)

    def _cut(self) -> None:
        {"before": self._cut_before, "during": self._cut_during, "after": self._cut_after}[self.case.when]()
        if not self.culprit:
            self.r.hear("restored", _PEER_PATIENCE_S)

    def _sever(self) -> None:
        assert self.links
        self.links.ask("cut")
        self.facts.fault_at = time.monotonic()
        self.r.say("fault", self.facts.fault_at)

    def _mend(self) -> None:
        """The link is back: after half a second, or once all have given up."""
        assert self.links
        if self.case.recovers:
            time.sleep(SHORT_CUT_S)
        else:
            for q in range(self.r.size):
                self.r.hear(f"over{q}", _PEER_PATIENCE_S)
        self.links.ask("restore")
        self.r.say("restored")

    def _mending(self) -> threading.Thread:
        thread = threading.Thread(target=self._mend)
        thread.start()
        return thread

    def _cut_before(self) -> None:
        if not self.culprit:
            self.facts.fault_at = float(self.r.hear("fault", _PEER_PATIENCE_S))
            self._attempts()
            return
        self._sever()
        mending = self._mending()
        self._attempts()
        mending.join()

    def _cut_during(self) -> None:
        if not self.culprit:
            self._attempts()
            self.facts.fault_at = float(self.r.hear("fault", _PEER_PATIENCE_S))
            return
        threads: list[threading.Thread] = []

        def begun(_: Issued) -> None:
            end = time.monotonic() + _PEER_PATIENCE_S
            while _interface_bytes() < start + (16 << 10) and time.monotonic() < end:
                time.sleep(0.001)
            self._sever()
            threads.append(self._mending())

        start = _interface_bytes()
        self._attempts(issued=begun)
        for thread in threads:
            thread.join()

    def _cut_after(self) -> None:
        r = self.r
        if not self._attempt():
            r.say(f"over{r.rank}")
            return
        self._together("through")
        if self.culprit:
            self._sever()
            mending = self._mending()
        self.facts.fault_at = float(r.hear("fault", _PEER_PATIENCE_S))
        self._attempts_left()
        r.say(f"over{r.rank}")
        if self.culprit:
            mending.join()

    def _frame(self) -> None:
        if self.tap:

            def act(frame: tap.Frame) -> list[tap.Frame]:
                self.r.say("fault", time.monotonic())
                return tap.SPOILT[self.case.fault](frame)

            self.tap.arm(self.frame_counts, self.case.when, act)
        self._together("armed")
        self._attempts()
        self.facts.fault_at = float(self.r.hear("fault", _PEER_PATIENCE_S))

    def _difference(self) -> None:
        """The odd rank comes first, with the others or last."""
        r, when = self.r, self.case.when
        if when == "before" and not self.culprit:
            r.hear(f"in{self.case.culprit}", _PEER_PATIENCE_S)
        if when == "during":
            self._together("go")
        if when == "after" and self.culprit:
            self._hear_others("in")
            time.sleep(0.05)
        self._attempts(odd=self.case.fault if self.culprit else "", issued=lambda _: r.say(f"in{r.rank}"))

    # ---- afterwards ----

    def _go_on(self) -> None:
        """The group is aborted and another one made of the ranks that live: it must work, and give the same bits."""
        r, case = self.r, self.case
        if any(attempt.error for attempt in self.facts.attempts):
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        dist.destroy_process_group()
        r.stores += 1
        again = dataclasses.replace(r, size=case.survivors, stores=10)
        again.init("lowcomm", timeout_s=60, pg_options=options(case))
        caller = Caller(case.kind, r.rank, case.survivors)
        if case.survivors == 1 and case.op == "send/recv":
            self.facts.went_on = "right"  # the group is there; there is nobody to talk to
        else:
            issued = caller.issue(case.op, _REFERENCE)
            issued.wait()
            if case.survivors == case.size and same_bits(issued.outputs, self.reference):
                self.facts.went_on = "equal"
            elif case.survivors < case.size and caller.right(case.op, _REFERENCE, issued.outputs):
                self.facts.went_on = "right"
            else:
                self.facts.went_on = "its result was another"
        dist.barrier()
        dist.destroy_process_group()


def play(r: Rank, case: Case, home: Home | None) -> dict[str, Any]:
    """A rank of the row, in a process of its own."""
    if home:
        home.enter(r.rank)
    return dataclasses.asdict(Player(r, case, home).play())
