"""Rounds as a store has them."""

import json

from torch_lowcomm.membership.patient_store import PatientStore

_THERE, _WITHDRAWN = "+", "-"  # before the id of a machine at its place


class RoundStore:
    """Rounds by number, from 1: the machines that have entered one, those it was closed with, and which of these connect."""

    def __init__(self, store: PatientStore, machine_id: str) -> None:
        self._store, self._id = store, machine_id

    def take_place(self) -> tuple[int, str]:
        """Enters the open round; returns its number and the key of this machine's place."""
        # The counter is only a hint, and never too high: the closer may have died before it counted.
        number = self._store.add("round", 0) + 1
        while self._store.find(f"{number}/members") is not None:
            number += 1
        key = f"{number}/place/{self._store.add(f'{number}/entered', 1)}"
        self._store.set(key, _THERE + self._id)
        return number, key

    def withdraw(self, key: str, *, wait: bool) -> None:
        """Gives this machine's place up, and waits for the store's answer or not."""
        set_key = self._store.set if wait else self._store.set_later
        set_key(key, _WITHDRAWN + self._id)

    def places(self, number: int) -> tuple[dict[str, str], set[str]]:
        """Returns the machines in a round, by key and in the order in which they came; and those that have withdrawn."""
        keys = [f"{number}/place/{place + 1}" for place in range(self._store.add(f"{number}/entered", 0))]
        found = {key: value.decode() for key in keys if (value := self._store.find(key))}
        # One that died and came again has several places, of which the last counts.
        last = {value[1:]: key for key, value in found.items()}
        here = {key: machine for machine, key in last.items() if found[key].startswith(_THERE)}
        return {key: here[key] for key in keys if key in here}, last.keys() - set(here.values())

    def close(self, number: int, members: list[str]) -> list[str]:
        """Closes a round, unless another machine has; returns the machines that it was closed with."""
        closed = json.loads(self._store.set_first(f"{number}/members", json.dumps(members)))
        self._store.set("round", str(number))
        return closed

    def members(self, number: int) -> list[str] | None:
        """Returns the machines that a round was closed with, in the order in which they came; None if it is open."""
        closed = self._store.find(f"{number}/members")
        return None if closed is None else json.loads(closed)

    def set_ready(self, number: int) -> None:
        """Says that this machine will connect to the others of a closed round."""
        self._store.set(f"{number}/ready/{self._id}", "")

    def all_ready(self, number: int, members: list[str]) -> bool:
        """Whether all of these machines have said so."""
        return self._store.has_all([f"{number}/ready/{machine}" for machine in members])

    def unready(self, number: int, members: list[str]) -> set[str]:
        """Returns those of these machines that have not."""
        return {machine for machine in members if not self.all_ready(number, [machine])}

    def set_absent(self, number: int, machines: list[str]) -> None:
        """Sets the machines of a closed round that do not connect, unless another machine has; if there are none, all connect."""
        self._store.set_first(f"{number}/absent", json.dumps(machines))

    def absent(self, number: int) -> list[str] | None:
        """Returns the machines of a closed round that do not connect; None before the first word."""
        word = self._store.find(f"{number}/absent")
        return None if word is None else json.loads(word)

    def name_late(self, number: int, machines: list[str]) -> list[str]:
        """Names the machines that the others of a group wait for no longer, unless another machine has; returns those named."""
        return json.loads(self._store.set_first(f"{number}/late", json.dumps(machines)))

    def late(self, number: int) -> list[str]:
        """Returns the machines of a group that were named so."""
        return json.loads(self._store.find(f"{number}/late") or "[]")

    def set_behind(self, number: int, machines: list[str]) -> None:
        """Notes machines that were named in earlier groups, and are not in this one."""
        self._store.set(f"{number}/behind", json.dumps(machines))

    def not_waited_for(self, number: int) -> set[str]:
        """Returns the machines for which those of a group do not wait when they form the next one."""
        return {*self.late(number), *json.loads(self._store.find(f"{number}/behind") or "[]")}

    def last_group(self, number: int) -> tuple[int, set[str], bool]:
        """Returns the number of the last round up to this one that connected, the machines of it and of later ones that have
        no word yet, and whether there is such a later one.
        """
        machines: set[str] = set()
        undecided = False
        while number > 0 and (absent := self.absent(number)) != []:
            if absent is None:  # not yet, or its machines are gone
                undecided = True
                machines |= set(self.members(number) or ())
            number -= 1
        return number, machines | set(self.members(number) or ()), undecided
