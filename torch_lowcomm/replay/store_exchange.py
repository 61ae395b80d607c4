"""Seed replay among machines that come and go, over a c10d store."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import random
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from torch_lowcomm import _C
from torch_lowcomm.membership.agreement import expect_alike
from torch_lowcomm.membership.heartbeat import Heartbeat
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.replay.agreed import Agreed, Founded
from torch_lowcomm.replay.asks import Ask, Asks
from torch_lowcomm.replay.founding import found
from torch_lowcomm.replay.mismatch import ReplayMismatch
from torch_lowcomm.replay.names import Names
from torch_lowcomm.replay.pace import Pace
from torch_lowcomm.replay.parameters import machine_number
from torch_lowcomm.replay.run_log import RunLog
from torch_lowcomm.replay.run_store import RunStore

logger = logging.getLogger("torch_lowcomm")

_VERSION = 1
_LEFT = b"left"
_CHECK_POLL_S = 0.01
_LONGEST_WAIT_S = 15.0  # before looking for something else than what is waited for


class StoreExchange:
    """The machines of a run, each a launcher of its own: they come, go, and agree on every iteration's record.

        store = dist.TCPStore("10.0.0.1", 29500, is_master=False)
        opt = lc.SeedReplay(model, exchange=StoreExchange(store, "office-a"))

    `PROTOCOL.md` beside this file says which keys there are, who writes them when, and what follows for machines that
    die, stop, wake up or come late. Machines trust each other: a wrong byte steers all of them.

    Args:
        store: A client of the store that all machines share, under a prefix of this run.
        machine_id: This machine's, unlike all others'; it may come back under it. A number below 2^64, or a name.
        least: How many machines there must be for a run to begin.
        deadline_factor: How long a machine waits for others' messages, in average iterations.
        deadline_least_s: The same in seconds, at least.
        deadline_most_s: The same in seconds, at most, and before anything was measured.
        lost_after_s: A machine that has been silent at the store for so long counts as gone; another may take its id.
        chunk: Iterations whose records are packed into one value; the same on all machines.
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
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"seed replay: store: expected a torch.distributed.Store, got {type(store).__name__}")
        self.machine = machine_number(machine_id)
        for name, value in (("least", least), ("chunk", chunk)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"seed replay: {name}: expected a whole number, 1 or more, got {value!r}")
        for name, value in (
            ("deadline_factor", deadline_factor),
            ("deadline_least_s", deadline_least_s),
            ("lost_after_s", lost_after_s),
        ):
            if not value > 0:
                raise ValueError(f"seed replay: {name}: expected a number above 0, got {value!r}")
        if deadline_most_s < deadline_least_s:
            raise ValueError(
                f"seed replay: deadline_most_s: expected {deadline_least_s!r}, which is deadline_least_s, or more, got "
                f"{deadline_most_s!r}"
            )
        self._patience_s = timeout.total_seconds()
        self._shared, self._name, self._lost_after_s = store, str(machine_id), lost_after_s
        self._least, self._chunk = least, chunk
        self._store = RunStore(self._client(), self._patience_s)
        self._names = Names(self._store)
        self._asks = Asks(self._store)
        self._log = RunLog(self._store, chunk)
        self._pace = Pace(deadline_factor, deadline_least_s, deadline_most_s)
        self._beat: Heartbeat | None = None
        self._founded: Founded
        self._head: Agreed
        self._value: bytes  # the head's, as it is at the store
        self._there: list[int] = []  # machines of the last record
        self._waited_s, self._void, self._dropped = 0.0, 0, 0

    # ---- what the optimizer asks (exchange.Exchange) ----
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
        text = f"store_protocol={_VERSION} chunk={self._chunk} {core.description}"
        expect_alike("SeedReplay", self._store.set_first("description", text.encode()).decode(), text)
        self._names.claim(self.machine, self._name)
        beats = PatientStore(self._client(), self._patience_s)
        self._beat = Heartbeat(beats, self._name, lost_after_s=self._lost_after_s)
        atexit.register(self._beat.stop)  # its thread must not come back when the interpreter is gone
        try:
            me = (self.machine, self._name)
            self._founded = found(
                self._store, self._asks, core, me, self._beat.alive, least=self._least, timeout_s=self._patience_s
            )
            entered = self._enter(core)
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
        if self._beat is None:
            raise RuntimeError("seed replay: expected join() before the first iteration, got exchange()")
        self._beat.alive()  # raises where the store is lost, or this machine's place
        machine, iteration, _ = _C.read_replay_message(message)
        if (machine, iteration) != (self.machine, core.iteration):
            raise ValueError(
                f"seed replay: message: expected one of machine {self.machine} and iteration {core.iteration}, got one of "
                f"machine {machine} and iteration {iteration}"
            )
        if self._head.closer == self.machine and self._head.record and self._log.due(core.iteration):
            self._log.pack(core, self._founded)
        begun = time.monotonic()
        agreed = None
        if self._head.iteration == core.iteration - 1 and self.machine in self._head.machines:
            agreed = self._agree(core, message, lr=lr, weight_decay=weight_decay)
        while agreed is None:
            logger.warning("seed replay: iteration %d: the others went on without this machine", core.iteration)
            self._pace.interrupted()
            agreed = self._enter(core)
            if agreed is None:
                if core.iteration != iteration:
                    message = core.message(self.machine, [])
                agreed = self._agree(core, message, lr=lr, weight_decay=weight_decay)
        self._waited_s += time.monotonic() - begun
        self._there = _C.read_replay_records(agreed.record)[0]["machines"]
        self._void += self.machine not in self._there
        return agreed.record

    def check(self, core: _C.SeedReplay) -> None:
        """Compares the weights with those of one other machine, drawn at random. All machines call it after the same iterations.

        Raises:
            ReplayMismatch: They differ.
            ConnectionError: The store is lost.
        """
        mine, iteration = core.checksum(), core.iteration
        self._store.put(f"sum/{self.machine}", f"{iteration} {mine}".encode())
        others = [machine for machine in self._there if machine != self.machine]
        if not others:
            return
        peer = random.choice(others)
        deadline = time.monotonic() + self._pace.deadline_s
        while True:
            at, theirs = map(int, (self._store.find(f"sum/{peer}") or b"-1 0").split())
            if at == iteration and mine != theirs:
                raise ReplayMismatch(
                    f"seed replay: expected the same weights as machine {self._names.of(peer)!r} at iteration {iteration}, "
                    f"with checksum {theirs:#010x}, got {mine:#010x}"
                )
            if at >= iteration or time.monotonic() > deadline:
                return
            time.sleep(_CHECK_POLL_S)

    def leave(self) -> None:
        """Says goodbye: the others do not wait for this machine. Any number of times; join() enters again."""
        if self._beat is None:
            return
        atexit.unregister(self._beat.stop)
        self._beat.stop()
        self._beat = None
        try:
            self._store.put(f"mail/{self.machine}", _LEFT)
        except ConnectionError as error:
            logger.warning("%s", error)

    def stats(self) -> dict[str, float]:
        """Counts since construction.

        Returns:
            `machines` of the last record; `sent_bytes` and `received_bytes`, keys and values at the store; `waited_s` in
            exchange(); `void`, own messages that no record has; `dropped`, other machines by this one.
        """
        return {
            "machines": len(self._there),
            "sent_bytes": self._store.sent_bytes,
            "received_bytes": self._store.received_bytes,
            "waited_s": self._waited_s,
            "void": self._void,
            "dropped": self._dropped,
        }

    # ---- one iteration ----
    def _agree(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> Agreed | None:
        """What is agreed on the core's iteration; None where the others went on without this machine."""
        iteration = core.iteration
        self._store.put(f"mail/{self.machine}", message)
        deadline = time.monotonic() + self._pace.deadline_s
        wait_s = self._pace.look_again_s
        while True:
            messages, missing, asked = self._mail(core, message)
            left = deadline - time.monotonic()
            if not missing or left <= 0:
                record = core.record(list(messages.values()), lr=lr, weight_decay=weight_decay)
                self._close(iteration, record, set(messages), missing, asked)
            elif (found := self._log.wait(iteration, min(wait_s, left))) is not None:
                self._head, self._value = found
            else:
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                self._look()
            if self._head.iteration == iteration:
                self._log.keep(self._head)
                self._pace.agreed()
                return self._head
            if self._head.iteration > iteration or self.machine not in self._head.machines:
                return None

    def _mail(self, core: _C.SeedReplay, message: bytes) -> tuple[dict[int, bytes], dict[int, str], int]:
        """Messages that have come, by machine; machines without one, and why; the number of asks."""
        others = [machine for machine in self._head.machines if machine != self.machine]
        *mails, asked = self._store.get_all([*(f"mail/{machine}" for machine in others), "asks"])
        messages, missing = {self.machine: message}, {}
        for machine, mail in zip(others, mails, strict=True):
            if mail == _LEFT:
                continue
            try:
                messages[machine] = _checked(core, machine, mail)
            except ValueError as error:
                missing[machine] = str(error)
        return messages, missing, int(asked)

    def _close(self, iteration: int, record: bytes, there: set[int], missing: dict[int, str], asked: int) -> None:
        """Makes a record the iteration's, unless it has one already."""
        joined = self._asks.admitted(self._head.asked, asked, iteration + 1)
        agreed = Agreed(iteration, record, tuple(sorted(there | joined)), asked, self.machine)
        if self._swap(agreed):
            self._dropped += len(missing)
            for machine, why in missing.items():
                name = self._names.of(machine)
                logger.warning("seed replay: iteration %d: dropped machine %r: %s", iteration, name, why)
            for machine in joined:
                logger.info("seed replay: iteration %d: let machine %r in", iteration, self._names.of(machine))

    def _swap(self, desired: Agreed) -> bool:
        """Moves the head on from what this machine knows it as; knows afterwards what it is."""
        value = desired.encode()
        self._know(self._store.swap("head", self._value, value))
        return self._value == value

    def _look(self) -> None:
        """Reads the head: somebody may have moved it and died before telling."""
        value = self._store.find("head")
        self._know(self._store.set_first("head", self._founded.head().encode()) if value is None else value)

    def _know(self, value: bytes) -> None:
        self._head, self._value = Agreed.decode(value), value
        if self._head.record:
            self._log.publish(self._head, value)

    # ---- coming in ----
    def _enter(self, core: _C.SeedReplay) -> Agreed | None:
        """Brings the core to the present, and this machine in.

        Returns:
            What is agreed on the core's iteration, after which this machine takes part; None where it does so now.
        """
        self._look()
        number, wait_s, deadline = 0, 1.0, time.monotonic() + self._patience_s
        while True:
            self._log.bring(core, self._founded, self._head)
            if self.machine in self._head.machines:
                return None
            if self._head.asked >= number:  # none yet, or answered with a no
                self._store.put(f"mail/{self.machine}", b"")
                number = self._asks.ask(Ask(self.machine, self._name, core.iteration))
            if (found := self._log.wait(core.iteration, wait_s)) is not None:
                self._head, self._value = found
                self._log.keep(self._head)
                if self.machine in self._head.machines:
                    return self._head
                deadline = time.monotonic() + self._patience_s
                continue
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            self._look()
            if self._head.iteration < core.iteration:
                self._take_over_or_wait(core, deadline)

    def _take_over_or_wait(self, core: _C.SeedReplay, deadline: float) -> None:
        """The next iteration's machines do not come to an end with it: are they all gone?"""
        alive = self._beat.alive()
        names = [self._names.of(machine) for machine in self._head.machines]
        if alive.isdisjoint(names):
            logger.warning("seed replay: iteration %d: %s are gone, going on without them", core.iteration, names)
            takeovers = self._head.takeovers + 1
            self._swap(
                dataclasses.replace(self._head, machines=(self.machine,), closer=self.machine, takeovers=takeovers)
            )
        elif time.monotonic() > deadline:
            raise TimeoutError(
                f"seed replay: expected {sorted(alive.intersection(names))} to let this machine in after iteration "
                f"{core.iteration}, got nothing in {self._patience_s:g} s"
            )

    def _client(self) -> PrefixStore:
        return PrefixStore("lowcomm/replay", self._shared.clone())


def _checked(core: _C.SeedReplay, machine: int, mail: bytes) -> bytes:
    """A machine's message of the core's iteration. ValueError: it is none, or spoilt."""
    if not mail:
        raise ValueError(f"expected a message of iteration {core.iteration}, got none")
    found, iteration, _ = _C.read_replay_message(mail)
    if (found, iteration) != (machine, core.iteration):
        raise ValueError(
            f"expected a message of machine {machine} and iteration {core.iteration}, got one of machine {found} and "
            f"iteration {iteration}"
        )
    core.record([mail], lr=0.0, weight_decay=0.0)  # checks its length, which is the codec's
    return mail
