"""A rank in a row: ops that are compared with undisturbed ones, until the fault is over or an op fails."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from faults.ops import Caller, options, same_bits
from faults.stage import PORT, RELAY_PORT, Notes, enter
from faults.tcp import orders
from faults.tcp.cases import FAILS, KEPT_OUT, Case

Rank = Any  # ranks.Rank, of the tests

# Of a tensor of all ranks: an op takes some hundredths of a second at the lab's rate.
ELEMENTS = {"exact": 48_000, "compressed": 240_000}
_UNDISTURBED, _AFTERWARDS = 3, 2  # turns of all ops
_MOST_S = 60.0
OPS = ("all_reduce", "all_gather", "reduce_scatter", "send/recv")


@dataclasses.dataclass
class Facts:
    """Facts that a rank saw; times are CLOCK_MONOTONIC's, which all processes share.

    Attributes:
        ops: Of every op that was done: its name, when it was called and how long it took.
        wrong: Ops whose result had other bits than the undisturbed one.
        called, ended: Of the op that failed.
        error, message: Its exception.
        making_s: How long the group's making took.
        made: How often connections were made, in ops, over all peers.
        paths: How peers were reached in the end.
        went_on: Whether the group that was made afterwards worked.
        again_s: How long its making took.
    """

    ops: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
    undisturbed: int = 0  # of them, the first
    wrong: int = 0
    called: float = 0.0
    ended: float = 0.0
    error: str = ""
    message: str = ""
    making_s: float = 0.0
    made: int = 0
    paths: list[str] = dataclasses.field(default_factory=list)
    went_on: bool | None = None
    again_s: float = 0.0


class Turns:
    """Ops in turn on data that every rank can compute, each with the bits of its first result."""

    def __init__(self, kind: str, rank: int, size: int, facts: Facts) -> None:
        self._caller = Caller(kind, rank, size, ELEMENTS[kind] // size)
        self._facts = facts
        self._first: dict[str, list[torch.Tensor]] = {}

    def turn(self) -> None:
        """Every op once."""
        for op in OPS if self._caller.size > 1 else OPS[:-1]:
            self._facts.called = time.monotonic()
            issued = self._caller.issue(op, "turn")
            issued.wait()
            self._facts.ops.append((op, self._facts.called, time.monotonic() - self._facts.called))
            if op not in self._first:
                self._first[op] = issued.outputs
                if not self._caller.right(op, "turn", issued.outputs):
                    raise AssertionError(f"{op}, undisturbed: expected what exact arithmetic gives or near it")
            self._facts.wrong += not same_bits(issued.outputs, self._first[op])


def _environment(case: Case, rank: int, secret: str, relay: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    if secret:
        os.environ["LOWCOMM_SECRET"] = secret
    if rank in case.relayed and "relay" in case.others:
        os.environ["LOWCOMM_RELAY"] = f"{relay}:{RELAY_PORT}"
    if rank in case.relayed and not case.behind_router:
        os.environ["LOWCOMM_DIAL_ONLY"] = "1"
    else:
        os.environ["LOWCOMM_LISTEN"] = f":{PORT}"


def _init(r: Rank, case: Case, deadline_s: float) -> None:
    r.init("lowcomm", timeout_s=deadline_s, pg_options=options(case.compressed))


def play(r: Rank, case: Case, notes: Notes, secrets: tuple[str, ...], relay: str) -> dict[str, Any]:
    """A rank of the row, or one of `Case.others`, in a process of its own; facts as a dict."""
    torch.set_num_threads(1)
    facts = Facts()
    if r.rank >= case.size:
        role = case.others[r.rank - case.size]
        if role == "pretender":
            _pretend(dataclasses.replace(r, rank=case.faulty, size=case.size), case, notes, secrets, relay, facts)
        else:
            _relay(role, case, notes)
        return dataclasses.asdict(facts)
    r = dataclasses.replace(r, size=case.size)
    enter(notes.namespaces[r.rank])
    _environment(case, r.rank, secrets[r.rank], relay)
    if case.fault.startswith("no descriptors") and r.rank == case.faulty:
        orders.fill_low_numbers()
    notes.say(f"here{r.rank}", os.getpid())
    notes.wait_all("here", range(case.size))
    if "relay" in case.others:
        notes.wait("there relay")
    _row(r, case, notes, facts)
    notes.say(f"gone{r.rank}")
    return dataclasses.asdict(facts)


def _row(r: Rank, case: Case, notes: Notes, facts: Facts) -> None:
    facts.called = time.monotonic()
    try:
        # A deadline that is short enough to pass is not for the making of groups on a busy machine.
        is_kept_out = case.of.outcome == KEPT_OUT
        _init(r, case, case.of.deadline_s if is_kept_out else _MOST_S)
        facts.making_s = time.monotonic() - facts.called
        turns = Turns(case.op_kind, r.rank, case.size, facts)
        for _ in range(_UNDISTURBED):
            turns.turn()
    except RuntimeError as error:
        if case.of.outcome != KEPT_OUT:
            raise
        facts.ended, facts.error, facts.message = time.monotonic(), type(error).__name__, str(error)
        return
    facts.undisturbed = len(facts.ops)
    made = _made()
    dist.barrier()
    r.set_deadline(case.of.deadline_s)
    stop = threading.Event()
    thread = threading.Thread(target=orders.obey, args=(notes, r.rank, stop))
    thread.start()
    try:
        _disturbed(r, case, notes, facts, turns)
        if not facts.error:
            facts.made = _made() - made
    finally:
        stop.set()
        thread.join()
    _go_on(r, case, notes, facts)


def _disturbed(r: Rank, case: Case, notes: Notes, facts: Facts, turns: Turns) -> None:
    """Turns until all know that the fault is over, and some more; or until one fails."""
    notes.say(f"ready{r.rank}")
    try:
        if case.when == "before":
            notes.wait("struck")
        elif case.when == "after":
            turns.turn()
            notes.say(f"done{r.rank}")
            notes.wait("struck" if case.of.outcome == FAILS else "over")
        end = time.monotonic() + _MOST_S
        over = torch.zeros(1, dtype=torch.int64)
        while not over.item() and time.monotonic() < end:
            turns.turn()
            over.fill_(notes.said("over"))
            facts.called = time.monotonic()
            dist.all_reduce(over, op=dist.ReduceOp.MIN)
        for _ in range(_AFTERWARDS):
            turns.turn()
        dist.barrier()
    except RuntimeError as error:
        facts.ended, facts.error, facts.message = time.monotonic(), type(error).__name__, str(error)
    notes.say(f"ended{r.rank}")


def _made() -> int:
    import torch_lowcomm as lc

    return sum(one["times_made"] for one in lc.connections(dist.group.WORLD).popitem()[1])


def _go_on(r: Rank, case: Case, notes: Notes, facts: Facts) -> None:
    """Another group of the ranks that live: it must work."""
    import torch_lowcomm as lc

    if facts.error:
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    else:
        facts.paths = sorted({one["path"] for one in lc.connections(dist.group.WORLD).popitem()[1]})
        dist.barrier()
    dist.destroy_process_group()
    notes.wait("mended")
    again = dataclasses.replace(r, size=case.survivors, stores=10)
    began = time.monotonic()
    _init(again, case, 60.0)
    facts.again_s = time.monotonic() - began
    Turns(case.op_kind, r.rank, case.survivors, Facts()).turn()
    dist.barrier()
    dist.destroy_process_group()
    facts.went_on = True


def _pretend(r: Rank, case: Case, notes: Notes, secrets: tuple[str, ...], relay: str, facts: Facts) -> None:
    """Another process that makes the group again, as the faulty rank, from what that one left in the store."""
    notes.wait("pretend")
    # Beside a rank that lives it stands on the host that has none.
    enter(notes.namespaces[case.faulty if case.fault == "started again" else case.size])
    _environment(case, case.faulty, secrets[case.faulty], relay)
    facts.called = time.monotonic()
    notes.say("pretending")
    try:
        _init(r, case, 15.0)
        dist.all_reduce(torch.ones(1000))
    except RuntimeError as error:
        facts.ended, facts.error, facts.message = time.monotonic(), type(error).__name__, str(error)
    notes.say("pretended", f"{facts.error}: {facts.message}" if facts.error else "")
    os._exit(0)


def _relay(role: str, case: Case, notes: Notes) -> None:
    """The relay, or the one that is started once that was killed, until all ranks that live are gone."""
    from torch_lowcomm import _C

    enter(notes.namespaces[case.size])

    def over() -> bool:
        return all(notes.said(f"gone{rank}") for rank in range(case.size)) or notes.said("stop")

    while role == "relay again" and not notes.said("start relay again"):
        if over():
            return
        time.sleep(0.005)
    relay = _C.Relay(f":{RELAY_PORT}")
    notes.say(f"there {role}", os.getpid())
    while not over():
        time.sleep(0.01)
    del relay
