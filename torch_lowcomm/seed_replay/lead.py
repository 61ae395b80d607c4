"""One rank of a machine acts, and the others follow each step of it that concerns the weights."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_lowcomm._log import logger
from torch_lowcomm.membership.site import ERRORS
from torch_lowcomm.seed_replay.exchange import ReplayMismatch
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks

# Errors of the first rank that the others raise too, by name; another one becomes a RuntimeError.
_ERRORS = ERRORS | {kind.__name__: kind for kind in (KeyError, OSError, ReplayMismatch, RuntimeError)}
# A follower calls this when it is told a step: it gets a number and bytes.
Steps = Mapping[str, Callable[[int, bytes], Any]]


class Lead:
    """Runs a function on a machine's first rank while the others do the `steps`, by name, that it tells them. A step may be a
    collective of the machine, or lead again: all ranks enter it at the same place.
    """

    def __init__(self, ranks: MachineRanks, steps: Steps) -> None:
        self._ranks, self._steps = ranks, steps

    def __call__(self, act: Callable[[], bytes | bool | None]) -> Any:
        """Calls `act` on the first rank; every rank returns what it returned, or raises what it raised. Collective. A step
        that fails on this rank and not on the first one is a RuntimeError: its weights are no longer the machine's.
        """
        if not self._ranks.first:
            return self._follow()
        value = self._acted(act)
        kind = "none" if value is None else "bool" if isinstance(value, bool) else "bytes"
        self._send(["returned", 0, kind], value if isinstance(value, bytes) else b"\1" if value else b"")
        return value

    def tell(self, step: str, *, number: int = 0, data: bytes = b"", act: Callable[[], Any]) -> Any:
        """On the first rank, inside `__call__`: tells the others a step, and returns the result of `act`, its own part."""
        self._send(["step", number, step], data)
        value = self._acted(act)
        self._send(["did", 0, step])
        return value

    def _acted(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except BaseException as error:
            try:
                self._send(["raised", 0, type(error).__name__], str(error).encode())
            except Exception as second:  # the ranks lost each other: then that is what the caller hears of
                logger.debug("SeedReplay: could not tell the machine's ranks of %r: %s", error, second)
            raise

    def _follow(self) -> bytes | bool | None:
        while True:
            (what, number, name), data = self._receive()
            if what == "returned":
                return data if name == "bytes" else None if name == "none" else bool(data)
            if what == "raised":
                text = data.decode()
                raise _ERRORS[name](text) if name in _ERRORS else RuntimeError(f"{name}: {text}")
            error = None
            try:
                self._steps[name](number, data)
            except Exception as raised:
                error = raised
            (what, _, said), data = self._receive()
            if error is not None and what != "raised":
                raise RuntimeError(
                    f"SeedReplay: {name}: expected to do what rank {self._ranks.ranks[0]}, the machine's first, did, got "
                    f"{type(error).__name__}: {error}"
                ) from error
            if error is None and what == "raised":
                logger.warning("SeedReplay: %s: failed on the machine's first rank: %s: %s", name, said, data.decode())

    def _send(self, head: list[Any], data: bytes = b"") -> None:
        text = json.dumps(head).encode()
        self._ranks.bytes_of_first(len(text).to_bytes(4, "little") + text + data)

    def _receive(self) -> tuple[list[Any], bytes]:
        found = self._ranks.bytes_of_first(b"")
        end = 4 + int.from_bytes(found[:4], "little")
        return json.loads(found[4:end]), found[end:]


class Led:
    """Stands for `target`, an exchange's or a checkpoint's, on the machine's first rank: all ranks do the methods that `steps`
    names, with the bytes and the number that they are called with.
    """

    def __init__(self, target: Any, lead: Lead, steps: Sequence[str]) -> None:
        self._target, self._lead, self._steps = target, lead, steps

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        return functools.partial(self._step, name, found) if name in self._steps else found

    def _step(self, name: str, call: Callable[..., Any], *args: Any, **numbers: int) -> Any:
        data = b"".join(part for part in args if isinstance(part, bytes))
        return self._lead.tell(name, number=sum(numbers.values()), data=data, act=lambda: call(*args, **numbers))
