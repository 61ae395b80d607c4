"""The standard set: every op on every link, lowcomm next to gloo, the link's ideal and a raw exchange."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import report

from linklab import cases, targets, validate
from linklab.ops_on_links import COLUMNS, MIB, OPS, Set, measure
from linklab.rank import CODED, EXACT, GLOO, RAW

KINDS = (GLOO, EXACT, CODED, RAW)


def _every(mib: int) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    return tuple((op, mib * MIB, KINDS) for op in OPS)


SETS = {
    "100mbit": Set(2, "100mbit", _every(16)),
    "1gbit": Set(2, "1gbit", _every(64)),
    "unshaped": Set(2, "unshaped", _every(64)),
    "4ranks": Set(4, "100mbit", _every(16)),
    "slow1of3": Set(3, "100mbit", (("all_reduce", 16 * MIB, (GLOO, EXACT, CODED)),), last_rate="20mbit"),
    "slow1of4": Set(4, "100mbit", (("all_reduce", 16 * MIB, (GLOO, EXACT, CODED)),), last_rate="20mbit"),
    "slowup1of3": Set(3, "100mbit", (("all_reduce", 16 * MIB, (GLOO, EXACT, CODED)),), last_rate="20mbit/100mbit"),
}


def main(args: argparse.Namespace) -> int:
    """Validates each lab, measures on it, reports."""
    names = args.only or [name for name, of in SETS.items() if not of.last_rate]  # those have a table of their own
    if wrong := sorted(set(names) - set(SETS)):
        raise ValueError(f"--only: expected sets of {', '.join(SETS)}, got {', '.join(wrong)}")
    if args.repetitions < 3:
        raise ValueError(f"--repetitions: expected 3 or more, got {args.repetitions}")
    options = {"repetitions": args.repetitions, "dtype": "float32", "codec": cases.CODEC}
    print(report.heading("linklab standard", **options), flush=True)
    rows: list[dict[str, Any]] = []
    validations: dict[str, list[validate.Row]] = {}
    for name in names:
        chosen = SETS[name]
        with chosen.lab() as lab:
            print(f"# {name}: {chosen.hosts} hosts, {chosen.rate}", flush=True)
            validations[name] = validate.validate(lab)
            print(f"{validate.table(validations[name])}\n{COLUMNS.heading()}", flush=True)
            if all(row.holds for row in validations[name]):
                rows += measure(name, chosen, lab, args.repetitions)
            else:
                print(f"# {name}: the lab is not what it should be (see above): nothing was measured on it", flush=True)
    labs = [
        report.Gate(f"{name}: the lab is what it should be", sum(not row.holds for row in found), "==", 0)
        for name, found in validations.items()
    ]
    content = {
        "options": options,
        "sets": {name: dataclasses.asdict(SETS[name]) for name in names},
        "validation": {name: validate.as_json(found) for name, found in validations.items()},
        "rows": rows,
    }
    return report.finish(labs + targets.gates(rows), args.json, content)
