"""One rank of a machine acts, and the others follow each step of it that concerns the weights."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from torch_lowcomm._log import logger
from torch_lowcomm.seed_replay.exchange import ReplayMismatch
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks

# Errors of the first rank that the others raise too, by name; another one becomes a RuntimeError.
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        ConnectionError,
        KeyError,
        OSError,
        ReplayMismatch,
        RuntimeError,
        TimeoutError,
        TypeError,
        ValueError,
        dist.DistBackendError,
    )
}
# A follower calls this when it is told a step: it gets a number and bytes.
Steps = Mapping[str, Callable[[int, bytes], Any]]


class Lead:
    """Runs a function on a machine's first rank while the others do the steps that it tells them.

    A step may be a collective of the machine, or lead again: all ranks enter it at the same place.

    Args:
        ranks: The machine's ranks.
        steps: By name, what the other ranks do at a step.
    """

    def __init__(self, ranks: MachineRanks, steps: Steps) -> None:
        self._ranks, self._steps = ranks, steps

    def __call__(self, act: Callable[[], bytes | bool | None]) -> bytes | bool | None:
        """Calls `act` on the first rank; every rank returns what it returned, or raises what it raised. Collective.

        Raises:
            RuntimeError: A step failed on this rank and not on the first one: its weights are no longer the machine's.
        """
        if not self._ranks.first:
            return self._follow()
        try:
            value = act()
        except BaseException as error:
            self._tell_error(error)
            raise
        kind = "none" if value is None else "bool" if isinstance(value, bool) else "bytes"
        self._send(["returned", 0, kind], value if isinstance(value, bytes) else b"\1" if value else b"")
        return value

    def tell(self, step: str, *, number: int = 0, data: bytes = b"", act: Callable[[], Any]) -> Any:
        """On the first rank, inside `__call__`: tells the others a step, and does the first rank's part of it.

        Args:
            step: Its name.
            number: A number for the others.
            data: Bytes for the others.
            act: The first rank's part.

        Returns:
            The result of `act`.
        """
        self._send(["step", number, step], data)
        try:
            value = act()
        except BaseException as error:
            self._tell_error(error)
            raise
        self._send(["did", 0, step])
        return value

    def _follow(self) -> bytes | bool | None:
        while True:
            (what, number, name), data = self._receive()
            if what == "returned":
                return data if name == "bytes" else None if name == "none" else bool(data)
            if what == "raised":
                raise _error(name, data.decode())
            error = None
            try:
                self._steps[name](number, data)
            except Exception as raised:
                error = raised
            (what, _, said), text = self._receive()
            if error is not None and what != "raised":
                raise RuntimeError(
                    f"SeedReplay: {name}: expected to do what rank {self._ranks.ranks[0]}, the machine's first, did, got "
                    f"{type(error).__name__}: {error}"
                ) from error
            if error is None and what == "raised":
                logger.warning("seed replay: %s: failed on the machine's first rank: %s: %s", name, said, text.decode())

    def _tell_error(self, error: BaseException) -> None:
        try:
            self._send(["raised", 0, type(error).__name__], str(error).encode())
        except Exception as second:  # the ranks lost each other: then that is what the caller hears of
            logger.debug("seed replay: could not tell the machine's ranks of %r: %s", error, second)

    def _send(self, head: list[Any], data: bytes = b"") -> None:
        text = json.dumps(head).encode()
        self._ranks.bytes_of_first(len(text).to_bytes(4, "little") + text + data)

    def _receive(self) -> tuple[list[Any], bytes]:
        found = self._ranks.bytes_of_first(b"")
        end = 4 + int.from_bytes(found[:4], "little")
        return json.loads(found[4:end]), found[end:]


def _error(name: str, text: str) -> Exception:
    return _ERRORS[name](text) if name in _ERRORS else RuntimeError(f"{name}: {text}")
