"""A codec's text, and what it says to a reader."""

from dataclasses import dataclass

from format_reader.refusal import insist

IDS = {
    "none": 0,
    "minmax": 1,
    "qsgd": 2,
    "lattice": 4,
    "sym": 5,
    "mid": 6,
    "sign1": 7,
    "levels": 9,
    "gauss": 10,
    "fp16": 11,
    "bf16": 12,
    "topk": 14,
    "logbyte": 15,
    "log9": 16,
}
WITH_BASE = {"minmax", "qsgd", "lattice", "levels"}
GRID = WITH_BASE | {"sym", "mid", "sign1", "gauss"}
FIXED_BITS = {"sign1": 1}
WITHOUT_BITS = set(IDS) - (GRID - set(FIXED_BITS))


@dataclass(frozen=True)
class Spec:
    """A codec as a reader must know it; it lacks the options of the writer alone (range)."""

    name: str
    bits: int = 0
    bucket: int = 0  # 0: all of the tensor; of topk the chunk
    channels: int = 0  # 0: not by channel
    short_meta: bool = False
    rotated: bool = False
    gain: float = 1.0
    keep: float = 0.2
    values: str = "sym8"
    poison: bool = False
    unit: int = 0  # elements; 0: none

    @property
    def has_base(self) -> bool:
        """Whether a bucket's metadata are base and step, not the step alone."""
        return self.name in WITH_BASE

    @property
    def spacing(self) -> int:
        """One of so many elements of a chunk is sent."""
        return self.bucket // int(self.keep)

    @property
    def meta_bytes(self) -> int:
        """Returns the bytes of a bucket's metadata."""
        return (2 if self.has_base else 1) * (2 if self.short_meta else 4)


def split_name(word: str) -> tuple[str, int]:
    """A codec's name and its bits."""
    if word in WITHOUT_BITS:
        return word, FIXED_BITS.get(word, 0)
    insist(word[:-1] in GRID and word[-1] in "12345678", f"{word}: no codec")
    insist(word != "sym1", "sym1: from 2 bits")
    return word[:-1], int(word[-1])


def parse(text: str) -> Spec:
    """Read a text that is valid, defaults filled in."""
    head, _, tail = text.partition(":")
    name, bits = split_name(head)
    options = dict(pair.split("=", 1) for pair in filter(None, tail.split(",")))
    if "axis" in options:
        insist(options["axis"] == "channel" and "C" in options, f"{text}: expected axis=channel,C=")
    gauss = name == "gauss"
    bucket = options.get("bucket", "512" if gauss else "1024") if name in GRID else options.get("chunk", "tensor")
    by_bucket = "axis" not in options and bucket != "tensor"
    return Spec(
        name=name,
        bits=bits,
        bucket=int(bucket) if by_bucket else 0,
        channels=int(options.get("C", 0)),
        short_meta=options.get("meta", "bf16" if gauss else "fp32") == "bf16",
        rotated=gauss or options.get("rotate") == "1",
        gain=float(options.get("gain", 1)),
        keep=float(options.get("keep", 0.2)),
        values=options.get("values", "sym8"),
        poison=options.get("nonfinite") == "poison",
        unit=int(options.get("unit", 0)),
    )
