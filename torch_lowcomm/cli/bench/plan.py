"""The measurement that a command line asks for."""

import argparse
import dataclasses
import re
from pathlib import Path

from torch_lowcomm.cli.bench.ops import OPERATIONS


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments of the command by their names, the same on every rank."""

    op: str
    minbytes: int
    maxbytes: int
    stepfactor: int
    iters: int
    warmup_iters: int
    datatype: str
    redop: str
    root: int
    codec: str | None
    peer: str | None
    rate: float | None  # of the link, bits a second
    json: Path | None  # file that rank 0 writes

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Plan":
        """Takes the fields from the arguments."""
        return cls(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(cls)})

    @property
    def policy(self) -> str | None:
        """The policy of the measured group; None for that of LOWCOMM_POLICY."""
        return None if self.codec is None else f"{OPERATIONS[self.op].key}={self.codec}"

    @property
    def sizes(self) -> list[int]:
        """The sizes in bytes."""
        sizes = [self.minbytes]
        while (size := sizes[-1] * self.stepfactor) <= self.maxbytes:
            sizes.append(size)
        return sizes


def number(text: str, thousand: int) -> int:
    """Returns the number of a text such as "64M" or "100Mbit", above 0; K, M and G are powers of `thousand`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B|bit(?:/s)?)?", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0 such as 65536, 64K or 1M, got {text!r}")
    return round(float(found[1]) * thousand ** ["", "K", "M", "G"].index(found[2].upper()))
