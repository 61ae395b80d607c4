"""The faults, committed from outside of the ranks: each is a generator that begins the fault, yields, and ends it.

Between the two an act that GOES_ON is over by itself; one that FAILS waits until every rank has given up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from linklab import Lab
from linklab.tools import nft

from faults.stage import Notes
from faults.tcp import crowd, outsiders
from faults.tcp.cases import FAILS, Case

_UNDER_WAY = 100_000  # bytes over the faulty rank's link, since all were ready: an op is in the middle
_MOVED = 100  # added to the last number of an address


@dataclasses.dataclass
class Act:
    """The means of an act: the row, the lab, the notes; and what it found.

    Attributes:
        ears: What was heard of connections as they were made, to rank 0 and to the last one, or None.
        reasons: Why the row fails, of what this side saw.
        crowded: When strangers were there: from, to.
        seen: Numbers for the report.
    """

    case: Case
    lab: Lab
    notes: Notes
    ears: outsiders.Ears | None = None
    reasons: list[str] = dataclasses.field(default_factory=list)
    crowded: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    seen: dict[str, Any] = dataclasses.field(default_factory=dict)

    def pid(self) -> int:
        """The faulty rank's process."""
        return int(self.notes.hear(f"here{self.case.faulty}"))

    def order(self, what: str, rank: int) -> None:
        """Has a rank do something to itself (orders.py)."""
        self.notes.say(f"{what}{rank}")

    def namespace(self, rank: int) -> str:
        """A rank's host; that after the last is of who is no rank."""
        return self.notes.namespaces[rank]


# ---- links, addresses, processes ----


def _silent(act: Act) -> Iterator[None]:
    act.lab.cut(act.case.faulty)
    yield
    if act.case.of.lasts_s:
        time.sleep(act.case.of.lasts_s)
    act.lab.restore(act.case.faulty)


def _lost_resets(act: Act) -> Iterator[None]:
    inside = act.namespace(act.case.faulty)
    rules = (
        "add table ip resets",
        "add chain ip resets out { type filter hook output priority 0 ; }",
        "add rule ip resets out tcp flags & rst == rst drop",
    )
    nft("; ".join(rules), inside=inside)
    try:
        act.order("disconnect", act.case.faulty)
        act.notes.wait(f"disconnect{act.case.faulty}.done")
        yield
        time.sleep(2.0)
    finally:
        nft("delete table ip resets", inside=inside)


def _moves(act: Act) -> Iterator[None]:
    host = act.case.faulty
    last = int(act.lab.address(host).rpartition(".")[2])
    act.lab.move(host, f"10.77.0.{last + _MOVED}")
    yield
    time.sleep(3.0)  # more than the silence that an end takes for a lost connection


def _stopped(act: Act) -> Iterator[None]:
    os.kill(act.pid(), signal.SIGSTOP)
    try:
        yield
        time.sleep(act.case.of.lasts_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(act.pid(), signal.SIGCONT)


def _killed(act: Act) -> Iterator[None]:
    os.kill(act.pid(), signal.SIGKILL)
    yield


def _started_again(act: Act) -> Iterator[None]:
    pid, end = act.pid(), time.monotonic() + 10
    os.kill(pid, signal.SIGKILL)
    while not _has_ended(pid):  # before that its port is taken
        if time.monotonic() > end:
            raise TimeoutError(f"expected process {pid} to end within 10 s of SIGKILL")
        time.sleep(0.002)
    act.notes.say("pretend")
    yield
    _expect_refused(act)


def _has_ended(pid: int) -> bool:
    """Whether a process is gone, or only its exit status is left: its other threads hold its sockets until they end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return True
    return state in "ZX" and len(threads) <= 1


def _another_process(act: Act) -> Iterator[None]:
    act.notes.say("pretend")
    act.notes.wait("pretending")
    yield
    _expect_refused(act)


def _expect_refused(act: Act) -> None:
    act.seen["pretender"] = said = act.notes.hear("pretended")
    if not said.startswith("DistBackendError"):
        act.reasons.append(f"another process, as the faulty rank: expected a DistBackendError, got {said or 'a group'}")


def _starved(act: Act) -> Iterator[None]:
    act.order("starve", act.case.faulty)
    yield
    act.notes.wait(f"starve{act.case.faulty}.done")


def _relay_killed(act: Act) -> Iterator[None]:
    os.kill(int(act.notes.hear("there relay")), signal.SIGKILL)
    yield
    time.sleep(act.case.of.lasts_s)
    act.notes.say("start relay again")
    act.notes.wait("there relay again")


def _nothing(act: Act) -> Iterator[None]:
    yield
    time.sleep(2.0)


# ---- who is no rank ----


def _strangers(act: Act) -> Iterator[None]:
    """In turn without and with them, twice."""
    yield
    for with_them in (False, True, True, False):
        began = time.monotonic()
        if with_them:
            made = crowd.strangers(act.namespace(0), act.lab.address(0), 3000, 3.0)
            act.seen["strangers"] = act.seen.get("strangers", 0) + made
            act.crowded.append((began, time.monotonic()))
        else:
            time.sleep(3.0)


def _loris(act: Act) -> Iterator[None]:
    assert act.ears
    began = time.monotonic()
    with crowd.loris(act.namespace(0), act.lab.address(0), 64, 5.0, act.ears.beginning()):
        yield
        for again in ("", " again"):
            time.sleep(1.5)
            act.order("reset", f"{act.case.faulty}{again}")
        time.sleep(max(0.0, began + 5.0 - time.monotonic()))


def _impostor(act: Act) -> Iterator[None]:
    yield
    assert act.ears
    act.reasons += outsiders.impostor(
        act.case.fault, act.ears, act.lab, act.namespace(act.case.size), act.case.size - 1
    )


ACTS: dict[str, Callable[[Act], Iterator[None]]] = {
    "silent link": _silent,
    "silent for good": _silent,
    "lost resets": _lost_resets,
    "another address, dials": _moves,
    "another address, is dialled": _moves,
    "router restarts": _moves,
    "stopped for a while": _stopped,
    "stopped for good": _stopped,
    "no descriptors, dials": _starved,
    "no descriptors, is dialled": _starved,
    "relay restarts": _relay_killed,
    "relay dies": _relay_killed,
    "behind a router": _nothing,
    "behind two routers": _nothing,
    "3,000 strangers": _strangers,
    "slow-loris": _loris,
    "resume, other process": _another_process,
    "kill -9": _killed,
    "started again": _started_again,
}


def direct(act: Act) -> None:
    """Commits the row's fault at its time, says when it has begun and when it is over, and mends what it broke."""
    case, notes = act.case, act.notes
    everybody = range(case.size)
    notes.wait_all("ready", everybody)
    if case.when == "in":
        before, end = act.lab.bytes(case.faulty), time.monotonic() + 10
        while (now := act.lab.bytes(case.faulty)).sent + now.received < before.sent + before.received + _UNDER_WAY:
            if time.monotonic() > end:
                raise TimeoutError(f"expected {_UNDER_WAY} bytes over the faulty rank's link within 10 s")
    elif case.when == "after":
        notes.wait_all("done", everybody)
    playing = ACTS.get(case.fault, _impostor)(act)
    try:
        next(playing)
        act.seen["struck"] = time.monotonic()
        notes.say("struck")
        if case.of.outcome == FAILS:
            notes.wait_all("ended", (rank for rank in everybody if rank < case.survivors and rank != _held(case)))
        next(playing, None)
        act.seen["over"] = time.monotonic()
        notes.say("over")
    finally:
        playing.close()
    notes.say("mended")


def _held(case: Case) -> int | None:
    """A rank that gives up only after the fault is over."""
    return case.faulty if case.fault == "stopped for good" else None


def new_secrets(case: Case) -> tuple[str, ...]:
    """Each rank's secret; the same, but for rows in which that is the fault."""
    if case.secret == "plain":
        return ("",) * case.size
    whole = [secrets.token_urlsafe(32)] * case.size
    if case.fault == "made without a secret":
        whole[case.faulty] = ""
    elif case.fault == "made with another secret":
        whole[case.faulty] = secrets.token_urlsafe(32)
    return tuple(whole)
