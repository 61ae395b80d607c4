"""The standard set: every op on every link, lowcomm next to gloo, the link's ideal and a raw exchange."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import report
from tables import Columns

from linklab import cases, targets, validate
from linklab.job import run_on_hosts
from linklab.lab import Lab
from linklab.link import ideal_s, parse_bits
from linklab.rank import CODES, GLOO, RAW

WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Set:
    """One link, one number of ranks, one size of tensor."""

    hosts: int
    rate: str
    elements: int


SETS = {
    "100mbit": Set(2, "100mbit", 16 << 18),
    "1gbit": Set(2, "1gbit", 64 << 18),
    "unshaped": Set(2, "unshaped", 64 << 18),
    "4ranks": Set(4, "100mbit", 16 << 18),
}


def measure(lab: Lab, chosen: Set, repetitions: int) -> list[list[dict[str, Any]]]:
    """Each rank's rows. LabError when a rank fails."""
    job = {
        "addresses": [lab.address(host) for host in range(lab.hosts)],
        "elements": chosen.elements,
        "repetitions": repetitions,
        "warm_up": WARM_UP,
    }
    # The user's sizes are no part of the question.
    return run_on_hosts(lab, "linklab.rank", job, env={"LOWCOMM_MIN_BYTES": "65536"})


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


def line(row: dict[str, Any]) -> str:
    """A fixed-width row of the timed sets."""
    names = row["set"], row["op"], row["group"]
    if "refused" in row:
        return f"  {names[0]:<9}{names[1]:<17}{names[2]:<16}  refused: {row['refused']}"
    shares = [None if row[name] is None else 100 * row[name] for name in ("of_ideal", "of_raw")]
    count = None if row["counted_bytes"] is None else row["counted_bytes"] / 1e6
    times = 1e3 * row["median_s"], 100 * row["spread"], row["times_gloo"]
    ends = row["interface_bytes"] / 1e6, row["relative_error"], row["wrong"]
    return COLUMNS.row(*names, *times, *shares, count, *ends)


COLUMNS = Columns(
    "set 9 | op 15 | group 15 | median ms 10.2f | spread % 9.1f | x gloo 8.2f | % ideal 8.1f | "
    "% raw 8.1f | sent MB 9.3f | wire MB 9.3f | error 9.1e | wrong 6"
)


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
    validations: dict[str, list[validate.Row]] = {}
    for name in names:
        chosen = SETS[name]
        with Lab(hosts=chosen.hosts, rate=chosen.rate) as lab:
            print(f"# {name}: {chosen.hosts} hosts, {chosen.rate}, {chosen.elements * 4 / 2**20:g} MiB", flush=True)
            validations[name] = validate.validate(lab)
            print(validate.table(validations[name]), flush=True)
            if not all(row.holds for row in validations[name]):
                print(f"# {name}: the lab is not what it should be (see above): nothing was measured on it", flush=True)
                continue
            mine = joined(name, chosen, measure(lab, chosen, args.repetitions))
        print("\n".join((COLUMNS.heading(), *map(line, mine))), flush=True)
        rows += mine
    content = {
        "options": options,
        "sets": {name: dataclasses.asdict(SETS[name]) for name in names},
        "validation": {name: validate.as_json(found) for name, found in validations.items()},
        "rows": rows,
    }
    labs = [
        report.Gate(f"{name}: the lab is what it should be", sum(not row.holds for row in found), "==", 0)
        for name, found in validations.items()
    ]
    return report.finish(labs + targets.gates(rows), args.json, content)
