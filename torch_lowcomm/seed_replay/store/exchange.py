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
from torch_lowcomm.seed_replay.store.catch_up import CatchUp
from torch_lowcomm.seed_replay.store.founding import Founding, found
from torch_lowcomm.seed_replay.store.head import Head
from torch_lowcomm.seed_replay.store.iteration import LEFT, Proposer
from torch_lowcomm.seed_replay.store.join_requests import JoinRequests
from torch_lowcomm.seed_replay.store.joining import Joiner
from torch_lowcomm.seed_replay.store.keeping import Keeper
from torch_lowcomm.seed_replay.store.keys import RunStore
from torch_lowcomm.seed_replay.store.log import RunLog
from torch_lowcomm.seed_replay.store.names import Names
from torch_lowcomm.seed_replay.store.options import StoreExchangeOptions
from torch_lowcomm.seed_replay.store.pace import Pace
from torch_lowcomm.seed_replay.store.run import Run
from torch_lowcomm.seed_replay.store.snapshots import Snapshots
from torch_lowcomm.seed_replay.store.weight_check import other_weights

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
            raise TypeError(f"seed replay: store: expected a torch.distributed.Store, got {type(store).__name__}")
        self._options = given = StoreExchangeOptions.named(**options)
        given.expect()
        self.machine = machine_number(machine_id)
        self._shared, self._name = store, str(machine_id)
        self._store = self._keys()
        self._names, self._requests = Names(self._store), JoinRequests(self._store)
        self._log = RunLog(self._store, given.chunk)
        folder = None if given.snapshots is None else Path(given.snapshots)
        self._snapshots = Snapshots(self._keys, given.snapshot_every, folder)
        self._catch_up = CatchUp(self._store, self._log, self._snapshots, resync=given.resync)
        self._pace = Pace(given.deadline_factor, given.deadline_least_s, given.deadline_most_s)
        self._beats: list[PatientStore] = []  # clients for signs of life, one for each join()
        # Between join() and leave():
        self._beat: Heartbeat | None = None
        self._run: Run
        self._founding: Founding
        self._head: Head
        self._proposer: Proposer | None = None
        self._joiner: Joiner
        self._keeper: Keeper
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
            ValueError: The run has another version, model or options, or did not begin with these weights; or a living
                machine has this machine's id.
            RuntimeError: The log does not reach back to the core's iteration.
            ReplayMismatch: The replayed weights differ from the others'.
            TimeoutError: There were too few machines to begin with, or nobody let this machine in.
            ConnectionError: The store is lost.
        """
        if self._beat is not None:
            raise RuntimeError("seed replay: expected leave() before another join(): an exchange serves one optimizer")
        options = self._options
        fixed = f"store_protocol={_VERSION} chunk={options.chunk} snapshot_every={options.snapshot_every}"
        text = f"{fixed} {core.agreement}"
        expect_equal("SeedReplay", self._store.set_first("description", text.encode()).decode(), text)
        self._names.claim(self.machine, self._name)
        self._beats.append(PatientStore(self._client(), options.timeout_s))
        self._beat = Heartbeat(self._beats[-1], self._name, lost_after_s=options.lost_after_s)
        atexit.register(self._end)
        try:
            run = self._run = Run(self._store, self._requests, self._names, self._beat, self.machine)
            self._founding = found(run, core, min_machines=options.min_machines, timeout_s=options.timeout_s)
            self._head = Head(self._store, self._log, self._founding.commit())
            self._proposer = Proposer(run, self._head, self._pace)
            self._joiner = Joiner(run, self._head, self._catch_up, self._founding, options.timeout_s)
            self._keeper = Keeper(options, self._head, self._log, self._snapshots, self._founding, self.machine)
            commit = self._joiner.join(core)
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
        if self._beat is None or self._proposer is None:
            raise RuntimeError("seed replay: expected join() before the first iteration, got exchange()")
        self._beat.alive()  # raises if the store is lost, or this machine's place
        core.check_message(message, machine=self.machine)
        iteration = core.iteration
        begun = time.monotonic()
        self._keeper.shorten(core, returned=self._returned)
        self._keeper.keep(core)
        last, commit = self._head.commit, None
        if last.iteration == iteration - 1 and self.machine in last.quorum:
            commit = self._proposer.commit(core, message, lr=lr, weight_decay=weight_decay)
        while commit is None:
            logger.warning("seed replay: iteration %d: the others went on without this machine", core.iteration)
            self._pace.interrupted()
            commit = self._joiner.join(core)
            if commit is None:
                if core.iteration != iteration:
                    message = core.message(self.machine, [])
                commit = self._proposer.commit(core, message, lr=lr, weight_decay=weight_decay)
        self._waited_s += time.monotonic() - begun
        told = _C.read_replay_records(commit.record)[0]
        self._there = told["machines"]
        self._void += self.machine not in self._there
        self._compare_rates(told, lr, weight_decay)
        self._returned = core.iteration
        return commit.record

    def check(self, core: _C.SeedReplay) -> bool:
        """Compares the weights with those of one other machine, drawn at random. All call it after the same iterations.

        A machine that is gone, or that does not send its checksum in time, is not compared with.

        Returns:
            Whether the weights were set to a snapshot.

        Raises:
            ReplayMismatch: The weights differ.
            ConnectionError: The store is lost.
        """
        if self._beat is None:
            return False  # before join() there is no other machine
        error = other_weights(self._run, core, self._there, wait_s=_CHECK_WAIT * self._pace.deadline_s)
        if error is None:
            return False
        # Nobody knows whose weights are wrong: with resync, every machine that sees a difference takes a snapshot.
        if not (self._catch_up.resync and self._catch_up.again(core, self._founding, self._head.commit)):
            raise error
        logger.warning("%s: took a snapshot", error)
        return True

    def leave(self) -> None:
        """Leaves the run, so that the others do not wait for this machine. It may be called any number of times."""
        if self._beat is None:
            return
        mail = self._names.mail(self.machine)
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
        if self._proposer is not None:
            self._dropped += self._proposer.dropped
        self._beat, self._proposer = None, None

    def stats(self) -> dict[str, float]:
        """Counts since construction.

        Returns:
            `machines` of the last record; `sent_bytes` and `received_bytes`, keys and values at the store, with signs of life
            in what is sent, without prefixes and the store's own framing; `waited_s`, seconds in `exchange`; `void`, own
            messages that no record has; `dropped`, other machines that this one dropped.
        """
        return {
            "machines": len(self._there),
            "sent_bytes": self._store.sent_bytes + self._snapshots.sent_bytes + sum(b.sent_bytes for b in self._beats),
            "received_bytes": self._store.received_bytes,
            "waited_s": self._waited_s,
            "void": self._void,
            "dropped": self._dropped + (0 if self._proposer is None else self._proposer.dropped),
        }

    def _compare_rates(self, told: dict[str, Any], lr: float, weight_decay: float) -> None:
        own, agreed = torch.tensor([lr, weight_decay]).tolist(), [told["lr"], told["weight_decay"]]
        if own != agreed and not self._warned:
            self._warned = True
            logger.warning(
                "seed replay: iteration %d: lr and weight decay are %s, those of the machine that has been here for longest; "
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

    def _keys(self) -> RunStore:
        return RunStore(self._client(), self._options.timeout_s)

    def _client(self) -> PrefixStore:
        return PrefixStore("lowcomm/replay", self._shared.clone())


StoreExchange.__signature__ = StoreExchangeOptions.completed(inspect.signature(StoreExchange))  # type: ignore[attr-defined]
