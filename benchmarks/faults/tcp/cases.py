"""The rows: which fault, when, in which group, and what must come of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

WHEN = ("before", "in", "after")
KINDS = ("exact", "coded")
SIZES = (2, 4)
SECRETS = ("plain", "secret")
# The outcome that a fault must have.
GOES_ON, FAILS, KEPT_OUT = "goes on", "fails", "kept out"

SLACK_S = 2.0  # how much later than the deadline an error may come
MOST_SLOWER, MOST_TIMES = 1.02, 2.0  # an op next to strangers / without: at the median, and at most


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: Of the row.
        outcome: GOES_ON: no error, and every bit that of the undisturbed ops. FAILS: every rank that lives raises an error
            that names the faulty one, in time. KEPT_OUT: the group is not made, and every rank says why.
        is_what: For the table's legend.
        deadline_s: Of progress.
        lasts_s: How long the fault lasts, which an op may wait for.
        pause_s: How much longer than that an op may take at most; FAILS: how late an error may come after the fault, where
            that is less than the deadline.
        when: The times that make a difference; "in" alone where it lasts for many ops.
        faulty: The faulty rank, from behind where negative.
        only: Groups that can have it: plain, secret.
        behind_router: Ranks whose hosts are, counted likewise.
        relayed: Whether the first and last rank only dial, and meet at a relay.
        spare: Whether another process waits to pretend that it is the faulty rank.
        tools: Programs that it needs, besides a lab's.
        outside: Whether nothing is done but by processes that are no ranks, so that no connection is to be made again.
        alone: Whether its row is run with no other beside it, for its seconds are judged.
    """

    name: str
    outcome: str
    is_what: str
    deadline_s: float = 20.0
    lasts_s: float = 0.0
    pause_s: float = 4.0
    when: tuple[str, ...] = WHEN
    faulty: int = -1
    only: tuple[str, ...] = SECRETS
    behind_router: tuple[int, ...] = ()
    relayed: bool = False
    spare: bool = False
    tools: tuple[str, ...] = ()
    outside: bool = False
    alone: bool = False


_ROUTED = {"tools": ("nft",), "pause_s": 8.0}
_SAID_OUTSIDE = {"faulty": 0, "pause_s": 2.0, "outside": True}

FAULTS = (
    # ---- what costs a pause ----
    Fault("silent link", GOES_ON, "the faulty rank's link is silent for 4 s", lasts_s=4.0),
    Fault(
        "lost resets",
        GOES_ON,
        "rank 0's connections are reset, and no peer hears of it: its host drops resets",
        faulty=0,
        tools=("nft",),
    ),
    Fault("another address, dials", GOES_ON, "the host of a rank that dials gets another address", pause_s=6.0),
    Fault(
        "another address, is dialled",
        GOES_ON,
        "the host of rank 0, which others dial, gets another address",
        faulty=0,
        pause_s=8.0,
    ),
    Fault("stopped for a while", GOES_ON, "SIGSTOP, and SIGCONT after 3 s, within the deadline", lasts_s=3.0),
    Fault(
        "no descriptors, dials",
        GOES_ON,
        "a rank that dials has no file descriptor left for 2 s, and its connections are reset",
        lasts_s=2.0,
    ),
    Fault(
        "no descriptors, is dialled",
        GOES_ON,
        "the same of rank 0, which others dial",
        lasts_s=2.0,
        faulty=0,
    ),
    Fault(
        "relay restarts",
        GOES_ON,
        "the relay between two ranks that only dial is killed, and started again after 1.5 s",
        lasts_s=1.5,
        pause_s=6.0,
        relayed=True,
    ),
    Fault(
        "router restarts",
        GOES_ON,
        "the router of rank 0, which translates addresses, forgets its connections and gets another address",
        faulty=0,
        behind_router=(0,),
        **_ROUTED,
    ),
    # ---- who cannot be dialled ----
    Fault(
        "behind a router",
        GOES_ON,
        "rank 0 cannot be dialled, and nobody says so",
        when=("in",),
        faulty=0,
        behind_router=(0,),
        **_ROUTED,
    ),
    Fault(
        "behind two routers",
        GOES_ON,
        "rank 0 and the last one cannot be dialled: they meet at a relay",
        when=("in",),
        behind_router=(0, -1),
        relayed=True,
        **_ROUTED,
    ),
    # ---- who is no rank ----
    Fault(
        "3,000 strangers",
        GOES_ON,
        "3,000 connections in 3 s of 40 addresses to rank 0: silent, garbage, half a beginning",
        when=("in",),
        lasts_s=0.0,
        faulty=0,
        alone=True,
    ),
    Fault(
        "slow-loris",
        GOES_ON,
        "64 strangers say a byte of a right beginning every 0.2 s, for 5 s, while rank 0's connections are reset",
        when=("in",),
        faulty=0,
    ),
    Fault("resume, other process", GOES_ON, "another process claims to be the last rank, which lives", spare=True),
    Fault("no secret", GOES_ON, "a hello of the group, which is right, without TLS", only=("secret",), **_SAID_OUTSIDE),
    Fault("wrong secret", GOES_ON, "a ClientHello whose key is of another secret", only=("secret",), **_SAID_OUTSIDE),
    Fault("another group's", GOES_ON, "a hello or ClientHello of a group with another number", **_SAID_OUTSIDE),
    Fault("replayed", GOES_ON, "all that a rank said as it dialled is said again", only=("secret",), **_SAID_OUTSIDE),
    Fault("reflected", GOES_ON, "what a rank said as it dialled, or was answered, is said to itself", **_SAID_OUTSIDE),
    # ---- what ends the group ----
    Fault("kill -9", FAILS, "the faulty rank's process is killed", deadline_s=10.0),
    Fault(
        "started again",
        FAILS,
        "the same, and at its port another process claims to resume",
        deadline_s=10.0,
        spare=True,
    ),
    Fault(
        "stopped for good", FAILS, "SIGSTOP past the deadline of 3 s; SIGCONT once all have given up", deadline_s=3.0
    ),
    Fault("silent for good", FAILS, "the link is silent past the deadline of 3 s", deadline_s=3.0),
    Fault("relay dies", FAILS, "the relay between two ranks that only dial is killed", deadline_s=3.0, relayed=True),
    # ---- what is refused at the beginning ----
    Fault("made without a secret", KEPT_OUT, "one rank has no secret", when=("before",), only=("secret",)),
    Fault("made with another secret", KEPT_OUT, "one rank has another secret", when=("before",), only=("secret",)),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row."""

    fault: str
    when: str
    kind: str
    secret: str
    size: int

    @property
    def name(self) -> str:
        """Returns the text that `--only` matches: `kill -9,in,coded,secret,4`."""
        return f"{self.fault},{self.when},{self.kind},{self.secret},{self.size}"

    @property
    def of(self) -> Fault:
        """Its fault."""
        return next(fault for fault in FAULTS if fault.name == self.fault)

    @property
    def faulty(self) -> int:
        """The faulty rank."""
        return self.of.faulty % self.size

    @property
    def behind_router(self) -> tuple[int, ...]:
        """Ranks whose hosts are."""
        return tuple(sorted(rank % self.size for rank in self.of.behind_router))

    @property
    def relayed(self) -> tuple[int, ...]:
        """Ranks that meet at a relay."""
        return (0, self.size - 1) if self.of.relayed else ()

    @property
    def others(self) -> tuple[str, ...]:
        """Processes of the row that are no ranks, in the order of their numbers behind those of the ranks."""
        spare = ("pretender",) if self.of.spare else ()
        # Where there is another rank than the two behind routers, that may be the relay.
        has_relay = self.relayed and not (self.behind_router and self.size > 2)
        return spare + (("relay", "relay again") if has_relay else ())

    @property
    def survivors(self) -> int:
        """Ranks of the group that is made afterwards."""
        return self.size - 1 if self.fault in ("kill -9", "started again") else self.size

    @property
    def compressed(self) -> bool:
        """Whether codecs are in force."""
        return self.kind == "coded"

    @property
    def op_kind(self) -> str:
        """As faults.ops.Caller has it."""
        return "compressed" if self.compressed else "exact"

    @property
    def needs_lab(self) -> bool:
        """All do."""
        return True

    @property
    def alone(self) -> bool:
        """Whether no other row may run beside it."""
        return self.of.alone

    def impossible(self) -> str:
        """Why there is no such row; "": there is one."""
        return ""


def matrix() -> Iterator[Case]:
    """Every row, in the order of the table."""
    for fault in FAULTS:
        kinds = KINDS if fault.outcome != KEPT_OUT else KINDS[:1]
        for kind in kinds:
            for when in fault.when:
                for secret in fault.only:
                    for size in SIZES:
                        yield Case(fault.name, when, kind, secret, size)


def quick() -> Iterator[Case]:
    """A row of each fault, of kinds, times, secrets and sizes in turn."""
    for number, fault in enumerate(FAULTS):
        kind = KINDS[number % 2] if fault.outcome != KEPT_OUT else KINDS[0]
        when = fault.when[-1] if number % 3 == 0 else fault.when[len(fault.when) // 2]
        yield Case(fault.name, when, kind, fault.only[(number // 2) % len(fault.only)], SIZES[(number // 3) % 2])
