"""One host's link to all others: its rates, delay and loss, and what a link of a rate can carry."""

from __future__ import annotations

import dataclasses
import re

# Ethernet header 14, IPv4 20, TCP 20 and its timestamps 12: what a full segment of 1500 bytes MTU carries.
SEGMENT_PAYLOAD, SEGMENT_FRAME = 1448, 1514
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)?bit", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_FACTOR = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclasses.dataclass(frozen=True)
class Link:
    """A host's link; a field out of its range is a ValueError.

    Args:
        up_bits: Bits a second that the host may send, frames' headers included; None: as fast as the machine.
        down_bits: The same for what it receives.
        delay_s: Seconds that each frame it sends arrives later, besides queues; a round trip takes the sum of two hosts'.
        loss: Share of the frames it sends that are lost, 0 to under 1.
    """

    up_bits: float | None = None
    down_bits: float | None = None
    delay_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("up_bits", "down_bits"):
            bits = getattr(self, name)
            if bits is not None and not 64e3 <= bits <= 10e9:
                raise ValueError(f"{name}: expected 64 kbit/s to 10 Gbit/s, got {bits:g} bit/s")
        if not 0 <= self.delay_s <= 10:
            raise ValueError(f"delay: expected 0 to 10 s, got {self.delay_s:g} s")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss: expected 0 to under 100 %, got {self.loss:.4%}")

    @property
    def forwarded(self) -> bool:
        """Whether frames pass our own forwarder: the kernel has no queue here that delays or loses them."""
        return self.delay_s > 0 or self.loss > 0

    def __str__(self) -> str:
        rate = rate_text(self.up_bits)
        if self.down_bits != self.up_bits:
            rate += "/" + rate_text(self.down_bits)
        delay = f" delay {self.delay_s * 1e3:g}ms" if self.delay_s else ""
        return rate + delay + (f" loss {self.loss * 100:g}%" if self.loss else "")


def parse_bits(text: str) -> float | None:
    """Bits a second of "100mbit", "1gbit", "500kbit"; None of "unshaped". ValueError for anything else."""
    if text == "unshaped":
        return None
    match = _RATE.fullmatch(text)
    if not match:
        raise ValueError(f"rate: expected a number and kbit, mbit or gbit, or unshaped; got {text!r}")
    return float(match[1]) * _FACTOR[(match[2] or "").lower()]


def parse_rate(text: str) -> tuple[float | None, float | None]:
    """(sent, received) bits a second of "10mbit/20mbit", or of one rate for both. ValueError for anything else."""
    up, slash, down = text.partition("/")
    return parse_bits(up), parse_bits(down if slash else up)


def parse_delay(text: str) -> float:
    """Seconds of "20ms", "150us", "1s". ValueError for anything else."""
    match = _TIME.fullmatch(text)
    if not match:
        raise ValueError(f"delay: expected a number and us, ms or s; got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def parse_loss(text: str) -> float:
    """The share that "0.1%" is. ValueError for anything else."""
    if not re.fullmatch(r"\d+(?:\.\d+)?%", text):
        raise ValueError(f"loss: expected a percentage such as 0.1%, got {text!r}")
    return float(text[:-1]) / 100


def rate_text(bits: float | None) -> str:
    """The shortest text of a rate that parse_bits reads."""
    if bits is None:
        return "unshaped"
    for unit, factor in (("g", 1e9), ("m", 1e6), ("k", 1e3)):
        if bits >= factor:
            return f"{bits / factor:g}{unit}bit"
    return f"{bits:g}bit"


def burst_bytes(bits: float) -> int:
    """The token bucket's size at a rate: bytes that go out at once after a pause.

    Small next to what is measured, for they are free of charge; at 1 Gbit/s large enough that a process which the
    scheduler kept for a millisecond finds its link's time not lost.
    """
    if bits <= 100e6:
        return 16 << 10
    return min(128 << 10, int((16 << 10) * bits / 100e6))


def goodput_bits(bits: float) -> float:
    """Bits a second of a TCP stream's own bytes on a link of a rate: the rate less the headers' share."""
    return bits * SEGMENT_PAYLOAD / SEGMENT_FRAME


def ideal_s(payload_bytes: float, bits: float) -> float:
    """The least seconds in which a link of a rate carries a TCP stream's bytes, the burst that is free subtracted."""
    return max(0.0, payload_bytes - burst_bytes(bits)) * 8 / goodput_bits(bits)
