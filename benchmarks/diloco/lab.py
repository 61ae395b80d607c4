"""Outer loops on slow links next to torchft's: speed, exposed communication, bytes and loss of one and the same setting.

    python benchmarks diloco_lab [--quick] [--only speed|losses] [--sites N ...] [--rate RATE ...] [--seeds N]
        [--runs DIR] [--json FILE] [--plot FILE]        # as root

On 2 and on 3 hosts of the lab, at 100 and at 10 Mbit/s, all cases take turns of two intervals, five times over; the second
interval counts. The losses are those of longer trainings with the same model, batch and interval (lab_losses.py).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import kept
import report
from linklab import LabError, LabUnavailable

from diloco import lab_gates, lab_losses, lab_plot, lab_table, torchft_loop
from diloco.lab_cases import QUICK, Setting
from diloco.measure import Row, measure

PARTS = ("speed", "losses")
_ROUNDS = 2  # of a turn; the first sends the message that travels in the second


def parse() -> tuple[argparse.Namespace, Setting]:
    """Reads the command line, and the setting that it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four cases once with a short interval: that it works")
    parser.add_argument("--only", choices=PARTS, help="one part; the other is taken from --runs where it is kept")
    parser.add_argument("--sites", type=int, nargs="+", help="hosts (2 3)")
    parser.add_argument("--rate", nargs="+", help="of every host (100mbit 10mbit)")
    parser.add_argument("--repetitions", type=int, help="turns of every case, of an interval each that counts (5)")
    parser.add_argument("--seeds", type=int, help="of the losses (3)")
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="keep each link and each case's losses there, and take them"
    )
    parser.add_argument("--json", type=Path, help="versions, machine, setting, rows, losses, gates")
    parser.add_argument("--plot", type=Path, help="PNG")
    args = parser.parse_args()
    given = {"sites": args.sites, "rates": args.rate, "repetitions": args.repetitions, "seeds": args.seeds}
    for name in ("repetitions", "seeds"):
        if given[name] is not None and given[name] < 1:
            parser.error(f"--{name}: expected 1 or more, got {given[name]}")
    try:
        kept.choose(args.runs)
    except ValueError as error:
        parser.error(str(error))
    chosen = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
    return args, dataclasses.replace(QUICK if args.quick else Setting(), **chosen)


def link(setting: Setting, sites: int, rate: str, *, peer: bool, measures: bool) -> list[Row]:
    """The rows of one link, measured or kept; none where they are neither to be measured nor kept."""
    options: dict[str, Any] = {name: getattr(setting, name) for name in ("model", "batch", "every", "repetitions")}
    turns = setting.turns(peer=peer)
    asked = {**options, "rate": rate, "turns": turns, "torchft": torchft_loop.version()}
    file = kept.file_of(measure, sites, asked)
    if (done := kept.read(file)) is None:
        if not measures:
            return []
        done = [dataclasses.asdict(row) for row in measure(turns, rate=rate, hosts=sites, rounds=_ROUNDS, **options)]
        kept.write(file, done)
    return [Row(**row) for row in done]


def losses(setting: Setting, sites: int, *, peer: bool, measures: bool) -> dict[str, list[float]]:
    """By case the loss of every seed, measured or kept; without those that are neither."""
    found = {}
    names = ("model", "batch", "every", "rounds_of_losses", "seeds")
    for case in setting.cases(peer=peer):
        asked = {**{name: getattr(setting, name) for name in names}, "case": case, "torchft": torchft_loop.version()}
        file = kept.file_of(lab_losses.of_case, sites, asked)
        done = kept.read(file)
        if done is None and measures:
            done = lab_losses.of_case(case, setting, sites)
            kept.write(file, done)
        if done is not None:
            found[case.name] = done
    return found


def main() -> int:
    """Measures and reports."""
    args, setting = parse()
    peer = torchft_loop.available()
    print(report.heading("diloco_lab", **dataclasses.asdict(setting), torchft=torchft_loop.version()), flush=True)
    links: list[dict[str, Any]] = []
    of_sites: list[dict[str, Any]] = []
    gates: list[report.Gate] = []
    try:
        for sites in setting.sites:
            trained = losses(setting, sites, peer=peer, measures=args.only != "speed")
            of_sites.append({"sites": sites, "rows": lab_losses.to_json(trained)})
            if args.only == "losses":
                print(lab_table.of_losses(sites, trained), flush=True)
            for rate in setting.rates:
                if measured := link(setting, sites, rate, peer=peer, measures=args.only != "losses"):
                    rows = lab_table.rows_of(measured, trained, setting)
                    print(lab_table.of_link(sites, rate, rows), flush=True)
                    links.append({"sites": sites, "rate": rate, "rows": rows})
                    gates += lab_gates.of_link(f"{sites} sites, {rate}", rows, setting.every, quick=args.quick)
    except (LabError, LabUnavailable, ValueError) as error:
        raise SystemExit(f"diloco_lab: {error}") from None
    if args.plot and links:
        lab_plot.draw(links, args.plot)
    content = {"setting": dataclasses.asdict(setting), "torchft": torchft_loop.version()}
    return report.finish(gates, args.json, content | {"links": links, "losses": of_sites})
