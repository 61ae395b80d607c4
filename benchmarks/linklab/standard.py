"""The standard set: every op on every link, lowcomm next to gloo, the link's ideal and a raw exchange."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

from linklab import cases, targets, validate
from linklab.errors import LabError
from linklab.lab import Lab
from linklab.link import ideal_s, parse_bits
from linklab.rank import CODES, GLOO, RAW

WARM_UP = 2
_DEADLINE_S = 3600
# Elements of the byte counts: every number of ranks from 2 to 8 divides them into whole buckets of 1024.
BYTES_ELEMENTS = 840 * 1024


@dataclasses.dataclass(frozen=True)
class Set:
    """One link, one number of ranks, one size of tensor."""

    hosts: int
    rate: str
    elements: int
    bytes_only: bool = False


SETS = {
    "100mbit": Set(2, "100mbit", 16 << 18),
    "1gbit": Set(2, "1gbit", 64 << 18),
    "unshaped": Set(2, "unshaped", 64 << 18),
    "4ranks": Set(4, "100mbit", 16 << 18),
    "bytes": Set(8, "unshaped", BYTES_ELEMENTS, bytes_only=True),
}


def measure(lab: Lab, chosen: Set, repetitions: int) -> list[list[dict[str, Any]]]:
    """Each rank's rows. LabError when a rank fails."""
    with tempfile.TemporaryDirectory(prefix="linklab-") as folder:
        path = Path(folder) / "job.json"
        job = {
            "addresses": [lab.address(host) for host in range(lab.hosts)],
            "ops": [op for op in cases.KEYS if not (chosen.bytes_only and op == "exchange")],
            "elements": chosen.elements,
            "repetitions": repetitions,
            "warm_up": WARM_UP,
            "bytes_only": chosen.bytes_only,
        }
        path.write_text(json.dumps(job))
        command = [sys.executable, "-m", "linklab.rank", str(path)]
        # The user's policy and sizes are no part of the question.
        env = validate.ON_HOSTS | {"LOWCOMM_POLICY": "", "LOWCOMM_MIN_BYTES": "65536"}
        ended = lab.run(command, timeout_s=_DEADLINE_S, env=env)
        # Those first that failed by themselves: the others were ended for it.
        failed = sorted((rank for rank in range(lab.hosts) if ended[rank].code), key=lambda rank: ended[rank].code < 0)
        if failed:
            said = "".join(f"\n---- rank {rank}: {ended[rank].code}\n{ended[rank].output[-3000:]}" for rank in failed)
            raise LabError(f"expected exit code 0 on every rank, ranks {failed} ended otherwise{said}")
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(lab.hosts)]


def joined(name: str, chosen: Set, ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row of all ranks': a repetition lasts from the first rank's start to the last one's end."""
    rows = []
    gloo_s: dict[str, float] = {}
    raw_s = {
        row["op"]: statistics.median(_seconds(same))
        for same in zip(*ranks, strict=True)
        if (row := same[0])["group"] == RAW
    }
    bits = parse_bits(chosen.rate)
    for same in zip(*ranks, strict=True):
        row = {"set": name, "op": same[0]["op"], "group": same[0]["group"]}
        if "refused" in same[0]:
            rows.append(row | {"refused": same[0]["refused"]})
            continue
        seconds = _seconds(same)
        quarter, median, three_quarters = statistics.quantiles(seconds, n=4)
        if row["group"] == GLOO:
            gloo_s[row["op"]] = median
        counts = [one["counted_bytes"] for one in same]
        needed = max(one["needed_bytes"] for one in same)
        sent = needed if None in counts else max(counts)
        crcs = {one["crc"] for one in same}
        rows.append(
            row
            | {
                "seconds": seconds,
                "median_s": median,
                "spread": (three_quarters - quarter) / median,
                "times_gloo": gloo_s[row["op"]] / median,
                "of_ideal": ideal_s(sent, bits) / median if bits else None,
                "of_raw": raw_s[row["op"]] / median if row["group"] in (*CODES, RAW) else None,
                "interface_bytes": max(statistics.median(one["interface_bytes"]) for one in same),
                "counted_bytes": None if None in counts else max(counts),
                "needed_bytes": needed,
                "relative_error": max(one["relative_error"] for one in same),
                "wrong": sum(not one["good"] for one in same) + len(crcs) - 1,
            }
        )
    return rows


def _seconds(same: tuple[dict[str, Any], ...]) -> list[float]:
    repetitions = zip(*(one["times"] for one in same), strict=True)
    return [max(end for _, end in one) - min(start for start, _ in one) for one in repetitions]


def joined_bytes(name: str, ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of every op, group and number of ranks: the most bytes that a rank sent."""
    rows = []
    for same in zip(*ranks, strict=True):
        row = {"set": name, **{key: same[0][key] for key in ("op", "group", "ranks")}}
        if "refused" in same[0]:
            rows.append(row | {"refused": same[0]["refused"]})
            continue
        counts = [one["counted_bytes"] for one in same[: row["ranks"]]]
        rows.append(
            row
            | {
                "counted_bytes": None if None in counts else max(counts),
                "needed_bytes": same[0]["needed_bytes"],
                "wrong": sum(not one["good"] for one in same),
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    """A fixed-width row of the timed sets."""
    start = f"  {row['set']:<9}{row['op']:<15}{row['group']:<14}"
    if "refused" in row:
        return f"{start}  refused: {row['refused']}"

    def percent(share: float | None) -> str:
        return f"{'-':>8}" if share is None else f"{share * 100:>8.1f}"

    count = row["counted_bytes"]
    return (
        f"{start}{row['median_s'] * 1e3:>10.2f}{row['spread'] * 100:>9.1f}{row['times_gloo']:>8.2f}"
        f"{percent(row['of_ideal'])}{percent(row['of_raw'])}"
        + (f"{'-':>9}" if count is None else f"{count / 1e6:>9.3f}")
        + f"{row['interface_bytes'] / 1e6:>9.3f}{row['relative_error']:>9.1e}{row['wrong']:>6}"
    )


HEADING = (
    f"# {'set':<9}{'op':<15}{'group':<14}{'median ms':>10}{'spread %':>9}{'x gloo':>8}{'% ideal':>8}{'% raw':>8}"
    f"{'sent MB':>9}{'wire MB':>9}{'error':>9}{'wrong':>6}"
)


def bytes_table(rows: list[dict[str, Any]]) -> str:
    """A line an op and group, a column a number of ranks."""
    sizes = sorted({row["ranks"] for row in rows})
    lines = [f"# {'MB sent by ranks':<29}" + "".join(f"{size:>9}" for size in sizes)]
    for op, group in dict.fromkeys((row["op"], row["group"]) for row in rows):
        mine = [row for row in rows if (row["op"], row["group"]) == (op, group)]
        start = f"  {op:<15}{group:<14}"
        if "refused" in mine[0]:
            lines.append(f"{start}  refused: {mine[0]['refused']}")
        elif None in (row["counted_bytes"] for row in mine):
            lines.append(f"{start}  not counted: gloo carries it")
        else:
            lines.append(start + "".join(f"{row['counted_bytes'] / 1e6:>9.4f}" for row in mine))
    return "\n".join(lines)


def main(args: argparse.Namespace) -> int:
    """Validates each lab, measures on it, reports."""
    names = args.only or list(SETS)
    if wrong := sorted(set(names) - set(SETS)):
        raise ValueError(f"--only: expected sets of {', '.join(SETS)}, got {', '.join(wrong)}")
    if args.repetitions < 3:
        raise ValueError(f"--repetitions: expected 3 or more, got {args.repetitions}")
    options = {"repetitions": args.repetitions, "warm_up": WARM_UP, "dtype": "float32", "codec": cases.CODEC}
    print(report.heading("linklab standard", **options), flush=True)
    rows: list[dict[str, Any]] = []
    counts: list[dict[str, Any]] = []
    validations: dict[str, list[validate.Row]] = {}
    for name in names:
        chosen = SETS[name]
        with Lab(hosts=chosen.hosts, rate=chosen.rate) as lab:
            print(f"# {name}: {chosen.hosts} hosts, {chosen.rate}, {chosen.elements * 4 / 2**20:g} MiB", flush=True)
            if chosen.bytes_only:
                counts += joined_bytes(name, measure(lab, chosen, args.repetitions))
                print(bytes_table(counts), flush=True)
                continue
            validations[name] = validate.validate(lab)
            print(validate.table(validations[name]), flush=True)
            if not all(row.holds for row in validations[name]):
                print(f"# {name}: the lab is not what it should be (see above): nothing was measured on it", flush=True)
                continue
            mine = joined(name, chosen, measure(lab, chosen, args.repetitions))
        print("\n".join((HEADING, *map(line, mine))), flush=True)
        rows += mine
    if args.plot:
        from linklab import plot

        plot.draw(rows, counts, args.plot)
    content = {
        "options": options,
        "sets": {name: dataclasses.asdict(SETS[name]) for name in names},
        "validation": {name: validate.as_json(found) for name, found in validations.items()},
        "rows": rows,
        "bytes": counts,
    }
    labs = [
        report.Gate(f"{name}: the lab is what it should be", sum(not row.holds for row in found), "==", 0)
        for name, found in validations.items()
    ]
    return report.finish(labs + targets.gates(rows, counts), args.json, content)
