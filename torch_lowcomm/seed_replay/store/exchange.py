"""Seed replay among machines that come and go, over a c10d store."""

import atexit
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from torch_lowcomm import _C
from torch_lowcomm._copies import NotCopied
from torch_lowcomm._log import logger
from torch_lowcomm._text_difference import expect_equal
from torch_lowcomm.membership.heartbeat import Heartbeat
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.seed_replay.exchange import machine_number
from torch_lowcomm.seed_replay.store.founding import found
from torch_lowcomm.seed_replay.store.head import Head
from torch_lowcomm.seed_replay.store.history import History
from torch_lowcomm.seed_replay.store.log import RunLog
from torch_lowcomm.seed_replay.store.member import LEFT, Member, Pace
from torch_lowcomm.seed_replay.store.options import StoreExchangeOptions
from torch_lowcomm.seed_replay.store.run import Run
from torch_lowcomm.seed_replay.store.snapshots import Snapshots

_VERSION = 2  # of PROTOCOL.md
_CHECK_WAIT = 0.25  # of T_apply, for a checksum: the others wait for this machine's next message meanwhile


class StoreExchange(NotCopied):
    """The machines of a run, each with a separate launcher. They come, go, and agree on every iteration's record.

        store = dist.TCPStore("10.0.0.1", 29500, is_master=False)
        opt = lc.SeedReplay(model, exchange=lc.StoreExchange(store, "office-a"))

    `PROTOCOL.md` next to this file says which keys there are, which machine writes them when, and what follows for machines
    that die, stop, wake up or come late. Machines trust each other: a wrong byte steers all of them. The learning rate and
    weight decay of a record are those of the machine in it that has been in the run for longest.

    Args:
        store: A client of the store that all machines share, under a prefix of this run.
        machine_id: Id of this machine, a number or a name, different from all others; the machine may come back under it.
        **options: Fields of `StoreExchangeOptions` (`torch_lowcomm.seed_replay`), which has their defaults and meanings:
            min_machines, lost_after_s, chunk, snapshot_every, timeout and others.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is wrong.
    """

    _instead = "make a new one"

    def __init__(self, store: Store, machine_id: int | str, **options: Any) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"SeedReplay: store: expected a torch.distributed.Store, got {type(store).__name__}")
        self._options = given = StoreExchangeOptions.named(**options)
        given.expect()
        self.machine = machine_number(machine_id)
        self._shared, self._name = store, str(machine_id)
        self._store = self._keys()
        self._run = Run(self._store, self.machine)
        folder = None if given.snapshots is None else Path(given.snapshots)
        self._snapshots = Snapshots(self._keys, given.snapshot_every, folder)
        self._pace = Pace(given.deadline_factor, given.deadline_least_s, given.deadline_most_s)
        self._beats: list[PatientStore] = []  # clients for signs of life, one for each join()
        # Between join() and leave():
        self._beat: Heartbeat | None = None
        self._head: Head
        self._member: Member | None = None
        self._history: History
        self._there: list[int] = []  # machines of the last record
        self._returned = 0  # the iteration of that record
        self._waited_s, self._void, self._dropped, self._warned = 0.0, 0, 0, False

    def attach(self, save: Callable[[], bytes], load: Callable[[bytes], None]) -> None:
        """Sets how snapshots are made and taken. The owner of the weights calls it.

        Args:
            save: Returns the weights, and everything else that belongs to the core's iteration, as bytes.
            load: Sets all this to such bytes, and the core to that iteration.
        """
        self._snapshots.attach(save, load)

    def join(self, core: _C.SeedReplay) -> None:
        """Joins the run, or founds it: brings the core to the present and waits to be let in.

        Raises:
            ValueError: The run has another version, model or options, did not begin with these weights, or has not reached
                their iteration; or a living machine has this machine's id.
            RuntimeError: The log does not reach back to the core's iteration, and there is no snapshot.
            ReplayMismatch: The replayed weights differ from the others'.
            TimeoutError: There were too few machines to begin with, or this machine was not let in.
            ConnectionError: The store is lost.
        """
        if self._beat is not None:
            raise RuntimeError("SeedReplay: expected leave() before another join(): an exchange serves one optimizer")
        options = self._options
        fixed = f"store_protocol={_VERSION} chunk={options.chunk} snapshot_every={options.snapshot_every}"
        text = f"{fixed} {core.agreement}"
        expect_equal("SeedReplay", self._store.set_first("description", text.encode()).decode(), text)
        self._run.claim(self._name)
        self._beats.append(self._keys())
        self._beat = Heartbeat(self._beats[-1], self._name, lost_after_s=options.lost_after_s)
        atexit.register(self._end)
        try:
            self._run.beat = self._beat
            founding = found(self._run, core, min_machines=options.min_machines, timeout_s=options.timeout_s)
            log = RunLog(self._store, options.chunk, founding)
            self._head = Head(self._store, log)
            self._history = History(self._run, self._head, log, self._snapshots, options)
            self._member = Member(self._run, self._head, self._history, self._pace, options.timeout_s)
            commit = self._member.join(core)
            if commit is not None:
                core.apply(commit.record)
        except BaseException:
            self.leave()
            raise

    def exchange(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> bytes:
        """Posts this machine's message of the core's iteration and returns the record that all machines apply.

        A machine that the others went on without is brought to the present first. The core then is at a later iteration,
        whose record is returned, and the message is void.

        Raises:
            ValueError: The message is of another machine or iteration.
            RuntimeError, ReplayMismatch, TimeoutError, ConnectionError: As `join` raises them.
        """
        if self._beat is None or self._member is None:
            raise RuntimeError("SeedReplay: expected join() before the first iteration, got exchange()")
        self._beat.alive()  # raises if the store is lost, or this machine's place
        core.check_message(message, machine=self.machine)
        iteration = core.iteration
        begun = time.monotonic()
        self._history.shorten(core, returned=self._returned)
        self._history.keep(core)
        last, commit = self._head.commit, None
        if last.iteration == iteration - 1 and self.machine in last.quorum:
            commit = self._member.commit(core, message, lr=lr, weight_decay=weight_decay)
        while commit is None:
            logger.warning("SeedReplay: iteration %d: the others went on without this machine", core.iteration)
            self._pace.interrupted()
            commit = self._member.join(core)
            if commit is None:
                if core.iteration != iteration:
                    message = core.message(self.machine, [])
                commit = self._member.commit(core, message, lr=lr, weight_decay=weight_decay)
        self._waited_s += time.monotonic() - begun
        told = _C.read_replay_records(commit.record)[0]
        self._there = told["machines"]
        self._void += self.machine not in self._there
        self._compare_rates(told, lr, weight_decay)
        self._returned = core.iteration
        return commit.record

    def check(self, core: _C.SeedReplay) -> bool:
        """As Exchange.check, with one other machine, drawn at random. All call it after the same iterations.

        A machine that is gone, or that does not send its checksum in time, is not compared with.

        Raises:
            ReplayMismatch: The weights differ.
            ConnectionError: The store is lost.
        """
        if self._beat is None:
            return False  # before join() there is no other machine
        error = self._history.differs(core, self._there, wait_s=_CHECK_WAIT * self._pace.deadline_s)
        if error is None:
            return False
        # Whose weights are wrong cannot be known: with resync, every machine that sees a difference takes a snapshot.
        if not self._history.resynced(core, error):
            raise error
        return True

    def leave(self) -> None:
        """Leaves the run, so that the others do not wait for this machine. It may be called any number of times."""
        if self._beat is None:
            return
        mail = self._run.mail_of(self.machine)
        try:
            posted = self._store.find(mail) or b""
            # In its place this process posted that mail; a successor that has come since posts something else.
            if self._beat.in_place():
                self._store.swap(mail, posted, LEFT)
        except ConnectionError as error:
            logger.warning("%s", error)
        finally:
            self._end()  # after the mail: with neither signs of life nor that mail it would be dropped, as if it had failed
            atexit.unregister(self._end)
        if self._member is not None:
            self._dropped += self._member.dropped
        self._beat, self._member = None, None

    def stats(self) -> dict[str, float]:
        """As Exchange.stats, since construction.

        `sent_bytes` and `received_bytes` are keys and values at the store, with signs of life in what is sent, without prefixes
        and the store's own framing; `waited_s` are seconds in `exchange`. And `void`, own messages that no record has; `dropped`,
        other machines that this one dropped.
        """
        return {
            "machines": len(self._there),
            "sent_bytes": self._store.sent_bytes + self._snapshots.sent_bytes + sum(b.sent_bytes for b in self._beats),
            "received_bytes": self._store.received_bytes,
            "waited_s": self._waited_s,
            "void": self._void,
            "dropped": self._dropped + (0 if self._member is None else self._member.dropped),
        }

    def _compare_rates(self, told: dict[str, Any], lr: float, weight_decay: float) -> None:
        own, agreed = torch.tensor([lr, weight_decay]).tolist(), [told["lr"], told["weight_decay"]]
        if own != agreed and not self._warned:
            self._warned = True
            logger.warning(
                "SeedReplay: iteration %d: lr and weight decay are %s, those of the machine that has been here for longest; "
                "this machine's own, %s, are not used",
                told["iteration"],
                agreed,
                own,
            )

    def _end(self) -> None:
        """Ends the threads: none may come back from the store when the interpreter is gone."""
        if self._beat is not None:
            self._beat.stop()
        self._snapshots.finish(self._options.timeout_s)

    def _keys(self) -> PatientStore:
        return PatientStore(PrefixStore("lowcomm/replay", self._shared.clone()), self._options.timeout_s, "SeedReplay")


StoreExchange.__signature__ = StoreExchangeOptions.completed(inspect.signature(StoreExchange))  # type: ignore[attr-defined]
