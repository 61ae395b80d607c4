"""What is timed: links, ways of a pipeline's messages, and the sizes of both, by name."""

from __future__ import annotations

import dataclasses

from linklab.link import burst_bytes, parse_bits

MICRO_BATCHES, AHEAD = 8, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of a step's messages.

    `schedule` and `ahead` are bound.order()'s. `stage` is "lc" or "torch" (PipelineStage). `group` carries its messages: "gloo",
    "lowcomm" (exact unless the stage says otherwise) or "lowcomm p2p" (with a policy of `FOUR_BITS`). `cache` is "" (none),
    "ram" or "file".
    """

    name: str
    schedule: str
    ahead: int = 0
    stage: str = "lc"
    group: str = "lowcomm"
    forward: str = ""
    backward: str = ""
    first: str = "minmax8:bucket=128"
    cache: str = ""

    @property
    def ours(self) -> bool:
        """Whether it is gated; others are shown next to it."""
        return self.stage == "lc"

    @property
    def order(self) -> str:
        """The schedule as a row shows it."""
        return f"{self.schedule} +{self.ahead}" if self.ahead else self.schedule


FOUR_BITS = "gauss4"
EXACT, DIRECT, DIRECT_2 = "exact", "gauss4, gauss4", "gauss2, gauss4"
CHANGES_2, CHANGES_4, IN_A_FILE = "changes gauss2, gauss4", "changes gauss4, gauss4", "changes gauss2, gauss4, file"
PAPER = {f"fw{fw}bw{bw}": (fw, bw) for fw, bw in ((4, 8), (3, 6), (2, 4))}  # the paper's presets, by channel
TORCH_GLOO, TORCH_EXACT, TORCH_CODED = "torch, gloo", "torch, lowcomm exact", "torch, lowcomm p2p=gauss4"
ORDERS = (("GPipe", 0), ("1F1B", 0), ("1F1B", AHEAD))


def of_links(*, whole: bool = True) -> list[Case]:
    """The cases of a link, those of a group together; with `whole` those too that only the gates of one link compare."""
    cases = []
    for schedule, ahead in ORDERS:
        cases += [Case(EXACT, schedule, ahead), Case(DIRECT, schedule, ahead, forward=FOUR_BITS, backward=FOUR_BITS)]
        if whole or schedule == "GPipe":
            cases.append(Case(CHANGES_2, schedule, ahead, forward="gauss2", backward="gauss4", cache="ram"))
    if whole:
        cases.append(Case(DIRECT_2, "GPipe", forward="gauss2", backward="gauss4"))
        cases.append(Case(CHANGES_4, "GPipe", forward="gauss4", backward="gauss4", cache="ram"))
    cases += paper()
    cases.append(Case(IN_A_FILE, "GPipe", forward="gauss2", backward="gauss4", cache="file"))
    for schedule in ("GPipe", "1F1B"):
        if whole:
            cases.append(Case(TORCH_EXACT, schedule, stage="torch"))
    cases += [Case(TORCH_GLOO, schedule, stage="torch", group="gloo") for schedule in ("GPipe", "1F1B")]
    cases += [Case(TORCH_CODED, schedule, stage="torch", group="lowcomm p2p") for schedule in ("GPipe", "1F1B")]
    return cases


def paper() -> list[Case]:
    """The paper's presets: changes with a scale for each channel, gradients likewise."""
    return [
        Case(name, "GPipe", forward=f"sym{fw}:axis=channel", backward=f"sym{bw}:axis=channel", cache="ram")
        for name, (fw, bw) in PAPER.items()
    ]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One link with what is timed on it.

    `shape` is that of a micro-batch's activation, float32: samples, tokens, channels. For `forward_s` and `backward_s`
    both stages sleep in place of computing a micro-batch. A case has its turn `repetitions` times.
    """

    rate: str
    delay: str  # each way; "" for none
    shape: tuple[int, int, int]
    forward_s: float
    backward_s: float
    repetitions: int
    cases: tuple[Case, ...]

    @property
    def burst(self) -> int:
        """Of the shapers: little next to a message, also where the lab's own would be a part of one."""
        return 4 << 10 if self.rate == "10mbit" else burst_bytes(parse_bits(self.rate) or 0)

    @property
    def congestion(self) -> str | None:
        """Reno where there is no delay: BBR, some machines' own, sends by the least round trip, and so too little while the other
        direction is busy.
        """
        return None if self.delay else "reno"

    @property
    def carried(self) -> bool:
        """Whether the lab has this rate: its forwarder, through which delayed frames pass, is slower than 1 Gbit/s."""
        return not (self.delay and self.rate == "1gbit")

    @property
    def link(self) -> str:
        """As a row shows it."""
        return f"{self.rate} {self.delay or '0ms'}"


# By rate: an activation, and how often each case has its turn. 10 Mbit/s has smaller activations, for exact ones to end.
_SIZES = {"10mbit": ((2, 32, 1024), 3), "100mbit": ((2, 64, 1024), 7), "1gbit": ((2, 64, 1024), 3)}
_COMPUTE = (0.015, 0.030)


def settings() -> list[Setting]:
    """The whole set, in the order in which it is measured."""
    return [
        Setting(rate, delay, shape, *_COMPUTE, repetitions, tuple(of_links(whole=rate == "100mbit")))
        for rate, (shape, repetitions) in _SIZES.items()
        for delay in ("", "25ms")
    ]


def slow_messages() -> Setting:
    """Where messages take longest: exact ones 16 times a stage's compute, 2 MiB at 100 Mbit/s."""
    return Setting("100mbit", "", (1, 512, 1024), 0.0037, 0.0073, 5, (Case(EXACT, "GPipe"), *paper()))


def quick() -> list[Setting]:
    """One link and the cases of its gates."""
    names = (DIRECT, CHANGES_2, TORCH_CODED)
    cases = tuple(case for case in of_links(whole=False) if case.name in names)
    return [Setting("100mbit", "25ms", (2, 64, 1024), *_COMPUTE, 3, cases)]
