"""The outer loops that are measured, by name: the peer of each, and those that are claimed to be fast on a link."""

from __future__ import annotations

import dataclasses

INT4 = "sym4:bucket=128"
OUTER_LR = 0.7
MOMENTUM = 0.6  # of every outer optimizer: 8 outer steps are too few for DiLoCo's 0.9
_BETWEEN = 4  # turns between two without communication
STANDS_STILL = 0.05  # of an interval, that a message may take for which training stands still


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of training.

    `loop`: "alone" (no communication), "lowcomm" (`lc.DiLoCoX` with the fields below), or "torchft" (its DiLoCo, which with
    a delay is its Streaming DiLoCo). `delay` in inner steps; None: a whole interval, or none with mode sync.
    """

    name: str
    loop: str = "lowcomm"
    mode: str = "continue"
    codec: str | None = INT4
    rank: int | None = None
    fragments: int = 1
    delay: int | None = None

    @property
    def ours(self) -> bool:
        """Whether it is what the gates are about."""
        return self.loop == "lowcomm"

    @property
    def blocking(self) -> bool:
        """Whether training stands still while an average is on its way, or there is none."""
        return self.loop == "alone" or self.mode == "sync" or (self.loop == "torchft" and self.delay is None)


ALONE = Case("no communication", "alone")
TORCHFT, TORCHFT_STREAMING = "torchft DiLoCo", "torchft Streaming"
# Of each of ours torchft's that waits, or does not wait, as it does. Those of "sync" and "streaming" have the same outer
# optimizer, fragments and delay; torchft has no loop whose message may travel for a whole interval, as "continue" has.
PEERS = {"sync": TORCHFT, "streaming": TORCHFT_STREAMING, "continue": TORCHFT_STREAMING}
STREAMING = {"mode": "restart", "fragments": 2, "delay": 5}
CASES = (
    Case("continue fp32", codec=None),
    Case("continue int4"),
    Case("continue gauss2", codec="gauss2"),
    Case("continue rank 64, int4", rank=64),
    Case(TORCHFT_STREAMING, "torchft", fragments=2, delay=5),
    Case("streaming fp32", codec=None, **STREAMING),
    Case("streaming int4", **STREAMING),
    Case("streaming gauss2", codec="gauss2", **STREAMING),
    Case("streaming rank 64, int4", rank=64, **STREAMING),
    Case(TORCHFT, "torchft"),
    Case("sync int4", mode="sync"),
    Case("sync gauss2", mode="sync", codec="gauss2"),
    Case("sync rank 64, int4", mode="sync", rank=64),
)
_QUICK = ("continue gauss2", "sync gauss2", TORCHFT)


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
        """All but the one without communication; those of the `peer` where it is installed."""
        chosen = [case for case in CASES if not self.quick or case.name in _QUICK]
        return [case for case in chosen if peer or case.ours]

    def turns(self, *, peer: bool) -> list[Case]:
        """The cases of a repetition in their order, with the one without communication before every four, and last."""
        cases = self.cases(peer=peer)
        parts = [[ALONE, *cases[i : i + _BETWEEN]] for i in range(0, len(cases), _BETWEEN)]
        return [case for part in parts for case in part] + [ALONE]


QUICK = Setting("base", 1, 12, (2,), ("100mbit",), 1, 2, 1, quick=True)


def peer_of(name: str) -> str | None:
    """Of one of ours the case of torchft that it is next to; None of the others."""
    return PEERS.get(name.partition(" ")[0])


def fewer_bytes_claimed(name: str) -> bool:
    """Whether a row is claimed to send 8 times fewer bytes at equal loss: 2 bits; 4 bits and steps send 7.5 times fewer."""
    return "gauss2" in name


def equal_loss_claimed(name: str) -> bool:
    """Whether a row is claimed to have torchft's loss: all but factors, which have 1.5 % more for 21 times fewer bytes."""
    return "rank" not in name
