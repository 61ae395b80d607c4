"""The cases of `diloco_lab`: outer loops on links, the peer of each, and those that are claimed to be fast on a link."""

from __future__ import annotations

import dataclasses

from diloco.cases import ALONE, CASES, Case
from diloco.measure import Row

TORCHFT, TORCHFT_STREAMING = "torchft DiLoCo", "torchft Streaming"
# Of each of ours torchft's that waits, or does not wait, as it does. Those of "sync" and "streaming" have the same outer
# optimizer, fragments and delay; torchft has no loop whose message may travel for a whole interval, as "continue" has.
PEERS = {"sync": TORCHFT, "streaming": TORCHFT_STREAMING, "continue": TORCHFT_STREAMING}
_NAMES = (
    "continue fp32",
    "continue int4",
    "continue gauss2",
    "continue rank 64, int4",
    TORCHFT_STREAMING,
    "streaming fp32",
    "streaming int4",
    "streaming gauss2",
    "streaming rank 64, int4",
    TORCHFT,
    "sync int4",
    "sync gauss2",
    "sync rank 64, int4",
)
_QUICK = ("continue gauss2", "sync gauss2", TORCHFT)
MOMENTUM = 0.6  # of every outer optimizer: 8 outer steps are too few for DiLoCo's 0.9
_BETWEEN = 4  # turns between two without communication
_STANDS_STILL = 0.05  # of an interval, that a message may take for which training stands still


@dataclasses.dataclass(frozen=True)
class Setting:
    """Model, batch and interval, which speed, bytes and losses have in common; links; how often each is measured."""

    model: str = "1.6M"
    batch: int = 8
    every: int = 100
    sites: tuple[int, ...] = (2, 3)
    rates: tuple[str, ...] = ("100mbit", "10mbit")
    repetitions: int = 5
    rounds_of_losses: int = 8
    seeds: int = 3
    quick: bool = False

    def cases(self, *, peer: bool) -> list[Case]:
        """All but the one without communication."""
        known = {case.name: case for case in CASES}
        names = _QUICK if self.quick else _NAMES
        chosen = [known[name] for name in names if peer or known[name].loop != "torchft"]
        return [dataclasses.replace(case, momentum=MOMENTUM) for case in chosen]

    def turns(self, *, peer: bool) -> list[Case]:
        """The cases of a repetition in their order, with the one without communication before every four, and last."""
        alone, cases = next(case for case in CASES if case.name == ALONE), self.cases(peer=peer)
        parts = [[alone, *cases[i : i + _BETWEEN]] for i in range(0, len(cases), _BETWEEN)]
        return [case for part in parts for case in part] + [alone]


QUICK = Setting("base", 1, 12, (2,), ("100mbit",), 1, 2, 1, quick=True)


def peer_of(name: str) -> str | None:
    """Of one of ours the case of torchft that it is next to; None of the others."""
    return PEERS.get(name.partition(" ")[0])


def sold(row: Row, every: int) -> bool:
    """Whether a row is claimed to keep its speed on its link, which its message's seconds there say before it is measured.

    Where training goes on meanwhile: the message takes less than the inner steps that it may take. Where training stands
    still: less than a twentieth of the interval.
    """
    if peer_of(row.name) is None:
        return False
    return row.message_s < _STANDS_STILL * every * row.step_s if row.fits is None else row.fits


def fewer_bytes_claimed(name: str) -> bool:
    """Whether a row is claimed to send 8 times fewer bytes at equal loss: 2 bits; 4 bits and steps send 7.5 times fewer."""
    return "gauss2" in name


def equal_loss_claimed(name: str) -> bool:
    """Whether a row is claimed to have torchft's loss: all but factors, which have 1.5 % more for 21 times fewer bytes."""
    return "rank" not in name
