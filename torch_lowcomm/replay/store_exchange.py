"""Seed replay among machines that come and go, over a c10d store."""

from __future__ import annotations

import atexit
import logging
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from torch_lowcomm import _C
from torch_lowcomm.membership.agreement import expect_alike
from torch_lowcomm.membership.heartbeat import Heartbeat
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.replay.asks import Asks
from torch_lowcomm.replay.catch_up import CatchUp
from torch_lowcomm.replay.closing import LEFT, Closing
from torch_lowcomm.replay.entry import Entry
from torch_lowcomm.replay.founding import found
from torch_lowcomm.replay.head import Head
from torch_lowcomm.replay.mismatch import ReplayMismatch
from torch_lowcomm.replay.names import Names
from torch_lowcomm.replay.pace import Pace
from torch_lowcomm.replay.parameters import machine_number
from torch_lowcomm.replay.run_log import LogMoved, RunLog, forget_chunks, forget_earlier
from torch_lowcomm.replay.run_store import RunStore
from torch_lowcomm.replay.snapshots import Snapshots

logger = logging.getLogger("torch_lowcomm")

_VERSION = 2  # of PROTOCOL.md
_CHECK_POLL_S = 0.01
_CHECK_WAIT = 0.25  # for a checksum, of T_apply: the others' runs already, and what is measured next takes time, too


class StoreExchange:
    """The machines of a run, each a launcher of its own: they come, go, and agree on every iteration's record.

        store = dist.TCPStore("10.0.0.1", 29500, is_master=False)
        opt = lc.SeedReplay(model, lr=1e-2, exchange=lc.StoreExchange(store, "office-a"))

    `PROTOCOL.md` beside this file says which keys there are, who writes them when, and what follows for machines that
    die, stop, wake up or come late. Machines trust each other: a wrong byte steers all of them.
    The learning rate and weight decay of a record are those of the machine in it that has been in the run for longest.

    Args:
        store: A client of the store that all machines share, under a prefix of this run.
        machine_id: This machine's, unlike all others'; it may come back under it. A number, or a name that stands for one.
        least: How many machines there must be for a run to begin.
        deadline_factor: How long a machine waits for others' messages, in average iterations.
        deadline_least_s: The same in seconds, at least.
        deadline_most_s: The same in seconds, at most, and before anything was measured.
        lost_after_s: A machine that has been silent at the store for so long counts as gone; another may take its id.
        chunk: Iterations whose records are packed into one value; the same on all machines.
        snapshot_every: Iterations from a snapshot of the weights to the next, a multiple of `chunk`; what the logs, the
            store's and `core.log`, have before the last but one is deleted. 0: they stay whole. The same on all machines.
        snapshots: A folder that all machines share, for snapshots; None: they go through the store, a machine's memory.
        resync: Take a snapshot where weights turn out to be others than the run's, instead of raising.
        timeout: Of the store's answers, and of waiting for machines to begin with or to let this one in.

    Raises:
        TypeError: Something of another type.
        ValueError: A number that will not do.
    """

    def __init__(
        self,
        store: Store,
        machine_id: int | str,
        *,
        least: int = 1,
        deadline_factor: float = 4.0,
        deadline_least_s: float = 5.0,
        deadline_most_s: float = 300.0,
        lost_after_s: float = 10.0,
        chunk: int = 256,
        snapshot_every: int = 0,
        snapshots: str | Path | None = None,
        resync: bool = False,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"seed replay: store: expected a torch.distributed.Store, got {type(store).__name__}")
        self.machine = machine_number(machine_id)
        for name, count, at_least in (("least", least, 1), ("chunk", chunk, 1), ("snapshot_every", snapshot_every, 0)):
            if isinstance(count, bool) or not isinstance(count, int) or count < at_least:
                raise ValueError(f"seed replay: {name}: expected an integer of {at_least} or more, got {count!r}")
        if snapshot_every % chunk:
            raise ValueError(
                f"seed replay: snapshot_every: expected a multiple of chunk, {chunk}, got {snapshot_every}"
            )
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
        self._shared, self._name, self._least = store, str(machine_id), least
        self._lost_after_s, self._timeout_s = lost_after_s, timeout.total_seconds()
        self._chunk, self._snapshot_every = chunk, snapshot_every
        self._options = f"store_protocol={_VERSION} chunk={chunk} snapshot_every={snapshot_every}"
        self._store = self._keys()
        self._names, self._asks = Names(self._store), Asks(self._store)
        self._log = RunLog(self._store, chunk)
        self._snapshots = Snapshots(self._keys, snapshot_every, None if snapshots is None else Path(snapshots))
        self._catch_up = CatchUp(self._store, self._log, self._snapshots, resync=resync)
        self._pace = Pace(deadline_factor, deadline_least_s, deadline_most_s)
        self._beats: list[PatientStore] = []  # clients for signs of life, one a stay
        self._beat: Heartbeat | None = None  # and what follows: only in a run
        self._head: Head
        self._closing: Closing | None = None
        self._entry: Entry
        self._there: list[int] = []  # machines of the last record
        self._returned = 0  # the iteration of that record
        self._waited_s, self._void, self._dropped, self._warned = 0.0, 0, 0, False

    def attach(self, save: Callable[[], bytes], load: Callable[[bytes], None]) -> None:
        """Says how snapshots are made and taken: whoever has the weights does it.

        Args:
            save: The weights, and all else that goes with the core's iteration, as bytes.
            load: Sets them so, and the core to that iteration.
        """
        self._snapshots.attach(save, load)

    def join(self, core: _C.SeedReplay) -> None:
        """Enters the run, or founds it: brings the core to the present and waits to be let in.

        Raises:
            ValueError: Another version, model or options than the run's; weights that it did not begin with; a living
                machine has this one's id.
            RuntimeError: The log does not reach back to the core's iteration.
            ReplayMismatch: The replayed weights are not the others'.
            TimeoutError: Too few machines to begin with, or nobody let this one in.
            ConnectionError: The store is lost.
        """
        if self._beat is not None:
            raise RuntimeError("seed replay: expected leave() before another join(): an exchange serves one optimizer")
        text = f"{self._options} {core.agreement}"
        expect_alike("SeedReplay", self._store.set_first("description", text.encode()).decode(), text)
        self._names.claim(self.machine, self._name)
        self._beats.append(PatientStore(self._client(), self._timeout_s))
        self._beat = Heartbeat(self._beats[-1], self._name, lost_after_s=self._lost_after_s)
        atexit.register(self._end)
        alive = self._beat.alive
        try:
            me = (self.machine, self._name)
            self._founded = found(
                self._store, self._asks, self._names, core, me, alive, least=self._least, timeout_s=self._timeout_s
            )
            self._head = head = Head(self._store, self._log, self._founded)
            self._closing = Closing(
                self._store, head, self._asks, self._names, self._pace, self.machine, self._beat.gone, self._beat.heard
            )
            self._entry = Entry(
                self._store,
                head,
                self._asks,
                self._names,
                self._catch_up,
                self._founded,
                self.machine,
                alive,
                self._timeout_s,
            )
            entered = self._entry.enter(core)
            if entered is not None:
                core.apply(entered.record)
        except BaseException:
            self.leave()
            raise

    def exchange(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> bytes:
        """Gives this machine's message of the core's iteration, and returns the record that all machines apply.

        A machine that the others went on without is brought to the present first: the core then is at a later
        iteration, whose record is returned, and the message is void.

        Raises:
            ValueError: A message of another machine or iteration.
            RuntimeError, ReplayMismatch, TimeoutError, ConnectionError: As join().
        """
        if self._beat is None or self._closing is None:
            raise RuntimeError("seed replay: expected join() before the first iteration, got exchange()")
        self._beat.alive()  # raises where the store is lost, or this machine's place
        machine, iteration, _ = _C.read_replay_message(message)
        if (machine, iteration) != (self.machine, core.iteration):
            raise ValueError(
                f"seed replay: message: expected one of machine {self.machine} and iteration {core.iteration}, got one of "
                f"machine {machine} and iteration {iteration}"
            )
        begun = time.monotonic()
        self._shorten_log(core)
        self._keep(core)
        head, agreed = self._head.agreed, None
        if head.iteration == iteration - 1 and self.machine in head.machines:
            agreed = self._closing.agree(core, message, lr=lr, weight_decay=weight_decay)
        while agreed is None:
            logger.warning("seed replay: iteration %d: the others went on without this machine", core.iteration)
            self._pace.interrupted()
            agreed = self._entry.enter(core)
            if agreed is None:
                if core.iteration != iteration:
                    message = core.message(self.machine, [])
                agreed = self._closing.agree(core, message, lr=lr, weight_decay=weight_decay)
        self._waited_s += time.monotonic() - begun
        told = _C.read_replay_records(agreed.record)[0]
        self._there = told["machines"]
        self._void += self.machine not in self._there
        self._compare(told, lr, weight_decay)
        self._returned = core.iteration
        return agreed.record

    def check(self, core: _C.SeedReplay) -> bool:
        """Compares the weights with those of one other machine, drawn at random. All call it after the same iterations.

        A machine that is gone, or does not come to it for long, is not compared with.

        Returns:
            Whether they were set anew.

        Raises:
            ReplayMismatch: They differ.
            ConnectionError: The store is lost.
        """
        mine, iteration = core.checksum(), core.iteration
        self._store.put(f"sum/{self.machine}", f"{iteration} {mine}".encode())
        others = [machine for machine in self._there if machine != self.machine]
        if not others:
            return False
        peer = random.choice(others)
        name = self._names.of(peer)
        deadline = time.monotonic() + _CHECK_WAIT * self._pace.deadline_s
        while True:
            at, theirs = map(int, (self._store.find(f"sum/{peer}") or b"-1 0").split())
            if at == iteration and mine != theirs:
                return self._differs(core, name, mine, theirs)
            if at >= iteration or self._gone(name) or time.monotonic() > deadline:
                return False
            time.sleep(_CHECK_POLL_S)

    def leave(self) -> None:
        """Says goodbye: the others do not wait for this machine. Any number of times; join() enters again."""
        if self._beat is None:
            return
        atexit.unregister(self._end)
        self._end()
        if self._closing is not None:
            self._dropped += self._closing.dropped
        beat, self._beat, self._closing = self._beat, None, None
        mail = self._names.mail(self.machine)
        try:
            posted = self._store.find(mail) or b""
            if (
                beat.in_place()
            ):  # then it was this process that posted; a successor that has come since posts something else
                self._store.swap(mail, posted, LEFT)
        except ConnectionError as error:
            logger.warning("%s", error)

    def stats(self) -> dict[str, float]:
        """Counts since construction.

        Returns:
            `machines` of the last record; `sent_bytes` and `received_bytes`, keys and values at the store, those of
            signs of life among what is sent, without prefixes and the store's own framing; `waited_s` in
            exchange(); `void`, own messages that no record has; `dropped`, other machines by this one.
        """
        return {
            "machines": len(self._there),
            "sent_bytes": self._store.sent_bytes + self._snapshots.sent_bytes + sum(b.sent_bytes for b in self._beats),
            "received_bytes": self._store.received_bytes,
            "waited_s": self._waited_s,
            "void": self._void,
            "dropped": self._dropped + (0 if self._closing is None else self._closing.dropped),
        }

    def _shorten_log(self, core: _C.SeedReplay) -> None:
        """Cuts the core's log off where the store's begins, but for records that the caller may not have seen yet."""
        if self._snapshot_every:
            snapshot = core.iteration // self._snapshot_every * self._snapshot_every
            core.forget_log(before=max(min(snapshot - self._snapshot_every, self._returned), 0))

    def _keep(self, core: _C.SeedReplay) -> None:
        """Packs the log and takes a snapshot, where this machine closed the last iteration of a chunk.

        Not where the run has gone on since, for the caller may have been away for long: others have packed that chunk then,
        and may have deleted it.
        """
        if not (self._log.due(core.iteration) and self._closed_last(core)):
            return
        self._head.look()
        if not self._closed_last(core):
            return
        try:
            self._log.pack(core, self._founded)
        except LogMoved:
            self._head.look()
            if self._closed_last(core):
                raise
            return
        if self._snapshots.due(core.iteration):
            self._snapshots.write(core, self._founded.iteration, self._forget)

    def _forget(self, store: RunStore, before: int) -> None:
        """Deletes what the log at the store has before an iteration."""
        forget_earlier(store, self._founded)
        forget_chunks(store, before, self._chunk)

    def _closed_last(self, core: _C.SeedReplay) -> bool:
        """Whether the head, as far as known, is the iteration before the core's, and this machine closed it."""
        head = self._head.agreed
        return head.closer == self.machine and bool(head.record) and head.iteration == core.iteration - 1

    def _compare(self, told: dict[str, Any], lr: float, weight_decay: float) -> None:
        own, agreed = torch.tensor([lr, weight_decay]).tolist(), [told["lr"], told["weight_decay"]]
        if own != agreed and not self._warned:
            self._warned = True
            logger.warning(
                "seed replay: iteration %d: lr and weight decay are %s, those of the machine that is here for longest; this "
                "machine's own, %s, are not used",
                told["iteration"],
                agreed,
                own,
            )

    def _gone(self, name: str) -> bool:
        return self._beat is not None and name in self._beat.gone()

    def _differs(self, core: _C.SeedReplay, peer: str, mine: int, theirs: int) -> bool:
        """Nobody knows whose weights are wrong: where they are set anew, all do so who see it."""
        error = ReplayMismatch(
            f"seed replay: expected the same weights as machine {peer!r} at iteration {core.iteration}, with checksum "
            f"{theirs:#010x}, got {mine:#010x}"
        )
        if not (self._catch_up.resync and self._catch_up.again(core, self._founded, self._head.agreed)):
            raise error
        logger.warning("%s: took a snapshot", error)
        return True

    def _end(self) -> None:
        """Ends the threads: they must not come back from the store when the interpreter is gone."""
        if self._beat is not None:
            self._beat.stop()
        self._snapshots.finish(self._timeout_s)

    def _keys(self) -> RunStore:
        return RunStore(self._client(), self._timeout_s)

    def _client(self) -> PrefixStore:
        return PrefixStore("lowcomm/replay", self._shared.clone())
