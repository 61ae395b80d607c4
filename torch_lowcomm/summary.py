"""What a process has sent, as a table: lc.summary(), and LOWCOMM_SUMMARY=1 for one at the end of rank 0's process."""

import atexit
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from torch_lowcomm import _C
from torch_lowcomm._table import aligned

_HEADS = "op|calls|exact calls|exact MB|sent MB|times fewer|coding s|waiting s|error|slowest"
_rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Summary:
    """What ops have moved; `print` shows it as a table.

    Attributes:
        ops: Figures by op, as `lc.stats` has them, summed over groups. "wait_by_peer" and "straggler" are by global rank.
    """

    ops: dict[str, dict[str, Any]]

    @property
    def raw_bytes(self) -> int:
        """Bytes that this rank would have sent without codecs."""
        return sum(of["raw_bytes"] for of in self.ops.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes that it sent, with frame headers; ops that NCCL carries count with their values."""
        return sum((of["wire_bytes"] or 0) + of["inner_bytes"] for of in self.ops.values())

    @property
    def coding_s(self) -> float:
        """Seconds of encoding and decoding."""
        return sum(of["encode_s"] + of["decode_s"] for of in self.ops.values())

    @property
    def wait_s(self) -> float:
        """Seconds that ops waited for other ranks."""
        return sum(of["wait_s"] for of in self.ops.values())

    def __str__(self) -> str:
        if not self.ops:
            return "lowcomm: no op has run in this process"
        found = sorted(self.ops.items(), key=lambda item: -item[1]["raw_bytes"])
        lines = aligned(_HEADS, [_row(op, of) for op, of in found])
        return "\n".join([*lines, *_reasons(self.ops), self._total()])

    def _total(self) -> str:
        """One sentence to quote."""
        raw, wire = self.raw_bytes, self.wire_bytes
        fewer = f", {raw / wire:.1f} times fewer" if wire and raw > wire else ""
        return (
            f"lowcomm: this rank sent {_mb(wire)} MB in place of {_mb(raw)} MB{fewer}; ops took {self.coding_s:.1f} s of coding "
            f"and {self.wait_s:.1f} s of waiting for other ranks"
        )


def summary() -> Summary:
    """Returns what all lowcomm groups of this process have moved, those that are gone included, since `reset_stats`."""
    return Summary(_C.process_stats())


def _row(op: str, of: Mapping[str, Any]) -> tuple[str, ...]:
    sent = (of["wire_bytes"] or 0) + of["inner_bytes"]
    error, slowest = of["relative_error"], of["straggler"]
    return (
        op,
        str(of["calls"]),
        str(of["exact_calls"]),
        _mb(of["raw_bytes"]),
        _mb(sent),
        f"{of['raw_bytes'] / sent:.1f}" if sent and of["raw_bytes"] else "-",
        f"{of['encode_s'] + of['decode_s']:.2f}",
        f"{of['wait_s']:.2f}",
        f"{error:.2g}" if error is not None else "-",
        f"rank {slowest}" if slowest is not None else "-",
    )


def _reasons(ops: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each reason for which tensors were sent exactly although a codec was asked for."""
    return [
        f"exact: {count} of {op}: {why}"
        for op, of in ops.items()
        for why, count in sorted(of["exact_because"].items(), key=lambda item: -item[1])
    ]


def _mb(count: int) -> str:
    return f"{count / 1e6:.3g}" if count < 1e8 else f"{count / 1e6:.0f}"


def note_rank(rank: int) -> None:
    """Keeps the global rank of this process, which its first group tells."""
    global _rank
    _rank = rank if _rank is None else _rank


def print_at_exit(environment: Mapping[str, str]) -> None:
    """Where LOWCOMM_SUMMARY is 1, prints the summary on stderr when the process of global rank 0 ends."""
    if environment.get("LOWCOMM_SUMMARY") == "1":
        atexit.unregister(_print)  # once, though `run --summary` asks again
        atexit.register(_print)


def _print() -> None:
    if not _rank and (found := summary()).ops:
        sys.stderr.write(f"{found}\n")
