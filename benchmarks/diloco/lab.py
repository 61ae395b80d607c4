"""Outer loops on slow links next to torchft's: speed, exposed communication, bytes and loss of one and the same setting.

    python benchmarks diloco_lab [--quick] [--only speed|losses] [--sites N ...] [--rate RATE ...] [--model 1.6M|10M]
        [--every 100] [--repetitions 5] [--seeds 3] [--runs DIR] [--json FILE]        # as root

On 2 and on 3 hosts of the lab, at 100 and at 10 Mbit/s, all cases take turns of two intervals, five times over; the second
interval counts. The losses are those of longer trainings with the same model, batch and interval.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import Any

import kept
import paired
import report
from steps.cases import MODELS
from tables import Columns

from diloco import measure as measured_by
from diloco import torchft_loop
from diloco.cases import QUICK, STANDS_STILL, Setting, equal_loss_claimed, fewer_bytes_claimed, peer_of
from diloco.measure import Row

SHARE = 0.93
LESS_EXPOSED, FEWER_BYTES, LOSS = 1 / 3, 8.0, 1.01  # next to torchft's
NEXT_TO_NOTHING = 0.01  # of an interval: where torchft is exposed for less, a third of it is no claim
COLUMNS = Columns(
    "case 24 | sold 5 | share 7.3f | least 7.3f | most 7.3f | MB sent 9.3f | fewer 8.1f | link s 8.3f | "
    "exposed s 11.3f | wait s 8.3f | own % 7.2f | loss 8.4f | / peer 8.4f | +- 7.4f"
)


def parse() -> tuple[argparse.Namespace, Setting]:
    """Reads the command line, and the setting that it asks for."""
    parser = report.arguments(__doc__, quick="four cases once with a short interval: that it works")
    parser.add_argument(
        "--only", choices=("speed", "losses"), help="the other part is taken from --runs where it is kept"
    )
    parser.add_argument("--sites", type=int, nargs="+", help="hosts (2 3)")
    parser.add_argument("--rate", nargs="+", dest="rates", help="of every host (100mbit 10mbit)")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--every", type=report.positive, help="inner steps of an interval (100)")
    parser.add_argument(
        "--repetitions", type=report.positive, help="turns of every case, of an interval each that counts (5)"
    )
    parser.add_argument("--seeds", type=report.positive, help="of the losses (3)")
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="keep each link and each case's losses there, and take them"
    )
    args = parser.parse_args()
    names = ("sites", "rates", "model", "every", "repetitions", "seeds")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    try:
        kept.choose(args.runs)
    except ValueError as error:
        parser.error(str(error))
    chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return args, dataclasses.replace(QUICK if args.quick else Setting(), **chosen)


def link(setting: Setting, sites: int, rate: str, *, peer: bool, measures: bool) -> list[Row]:
    """The rows of one link, measured or kept; none where they are neither to be measured nor kept."""
    names = ("model", "batch", "every", "repetitions")
    options: dict[str, Any] = {name: getattr(setting, name) for name in names}
    asked = {**options, "rate": rate, "turns": setting.turns(peer=peer), "torchft": torchft_loop.version()}
    file = kept.file_of(measured_by.measure, sites, asked)
    if (done := kept.read(file)) is None:
        if not measures:
            return []
        done = [dataclasses.asdict(row) for row in measured_by.measure(setting, sites=sites, rate=rate, peer=peer)]
        kept.write(file, done)
    return [Row(**row) for row in done]


def losses(setting: Setting, sites: int, *, peer: bool, measures: bool) -> dict[str, list[float]]:
    """By case the loss of every seed, measured or kept; without those that are neither."""
    found = {}
    names = ("model", "batch", "every", "rounds_of_losses", "seeds")
    for case in setting.cases(peer=peer):
        asked = {**{name: getattr(setting, name) for name in names}, "case": case, "torchft": torchft_loop.version()}
        file = kept.file_of(measured_by.losses, sites, asked)
        done = kept.read(file)
        if done is None and measures:
            done = measured_by.losses(case, setting, sites)
            kept.write(file, done)
        if done is not None:
            found[case.name] = done
    return found


def sold(row: Row, every: int) -> bool:
    """Whether a row is claimed to keep its speed on its link, which its message's seconds there say before it is measured.

    Where training goes on meanwhile: the message takes less than the inner steps that it may take. Where training stands
    still: less than a twentieth of the interval.
    """
    if peer_of(row.name) is None:
        return False
    return row.message_s < STANDS_STILL * every * row.step_s if row.fits is None else row.fits


def rows_of(measured: list[Row], trained: dict[str, list[float]], setting: Setting) -> list[dict[str, Any]]:
    """Every row as the JSON has it.

    Returns:
        The fields of `Row`; `share_least` and `share_most`; `sold`; of ours `own`, the outer step's work / 100 inner steps;
        `peer`, and of those that have one `fewer` (its bytes / these) and `peer_exposed_s`; where both were trained `loss`,
        `loss_by_peer` and its standard error `loss_error`.
    """
    named = {row.name: row for row in measured}
    found = []
    for row in measured:
        fields = dataclasses.asdict(row)
        fields |= {"share_least": min(row.shares), "share_most": max(row.shares), "sold": sold(row, setting.every)}
        if row.ours:
            fields["own"] = row.own
        name = peer_of(row.name)
        fields["peer"] = name if name in named else None
        if fields["peer"]:
            peer = named[name]
            fields |= {"fewer": peer.sent / row.sent, "peer_exposed_s": peer.exposed_s}
        if row.name in trained:
            fields["loss"] = statistics.mean(trained[row.name])
            if fields["peer"] in trained:
                ratio = paired.ratio(float, trained[row.name], trained[name])
                fields |= {"loss_by_peer": ratio.mean, "loss_error": ratio.error}
        found.append(fields)
    return found


def show(sites: int, rate: str, rows: list[dict[str, Any]]) -> None:
    """A line a case."""
    first = rows[0]
    print(
        f"# {sites} sites, {rate}: an inner step takes {first['step_s']:.3f} s, all sites {first['speed']:.0f} tokens/s"
    )
    print(COLUMNS.heading())
    for row in rows:
        shares = [row[name] for name in ("share", "share_least", "share_most")]
        times = [row[name] for name in ("message_s", "exposed_s", "waited_s")]
        own = 100 * row["own"] if "own" in row else None
        loss = [row.get(name) for name in ("loss", "loss_by_peer", "loss_error")]
        cells = "yes" if row["sold"] else None, *shares, row["sent"] / 1e6, row.get("fewer"), *times, own, *loss
        print(COLUMNS.row(row["name"], *cells), flush=True)


def show_losses(sites: int, trained: dict[str, list[float]]) -> None:
    """A line a case."""
    print(f"# {sites} sites: loss{'':<12}{'mean':>8}  of every seed")
    for name, found in trained.items():
        print(f"  {name:<24}{statistics.mean(found):>8.4f}  {' '.join(f'{loss:.4f}' for loss in found)}", flush=True)


def gates_of(link: str, rows: list[dict[str, Any]], every: int, *, quick: bool) -> list[report.Gate]:
    """Of one link's rows: of those that are sold, and of all of ours the bytes; `quick`: those that short intervals show."""
    gates = []
    for row in rows:
        what = f"{link}: {row['name']}"
        if "fewer" in row and fewer_bytes_claimed(row["name"]):
            gates.append(report.Gate(f"{what}, {row['peer']}'s bytes / its", row["fewer"], ">=", FEWER_BYTES))
        if quick or not row["sold"]:
            continue
        gates.append(report.Gate(f"{what}, share of the speed without communication", row["share"], ">=", SHARE))
        if row["peer"]:
            interval_s, exposed_s = every * row["step_s"], row["exposed_s"]
            if row["peer_exposed_s"] < NEXT_TO_NOTHING * interval_s:
                name, value, bound = f"{what}, exposed seconds / interval", exposed_s / interval_s, NEXT_TO_NOTHING
            else:
                name = f"{what}, exposed seconds / {row['peer']}'s"
                value, bound = exposed_s / row["peer_exposed_s"], LESS_EXPOSED
            gates.append(report.Gate(name, value, "<=", bound))
        if "loss_by_peer" in row and equal_loss_claimed(row["name"]):
            name = f"{what}, loss / {row['peer']}'s, bound 1.01 + a standard error"
            gates.append(report.Gate(name, row["loss_by_peer"], "<=", LOSS + row["loss_error"]))
    return gates


def main() -> int:
    """Measures and reports."""
    args, setting = parse()
    peer = torchft_loop.available()
    print(report.heading("diloco_lab", **dataclasses.asdict(setting), torchft=torchft_loop.version()), flush=True)
    links: list[dict[str, Any]] = []
    of_sites: list[dict[str, Any]] = []
    gates: list[report.Gate] = []
    for sites in setting.sites:
        trained = losses(setting, sites, peer=peer, measures=args.only != "speed")
        rows = [{"name": name, "loss": statistics.mean(of), "losses": of} for name, of in trained.items()]
        of_sites.append({"sites": sites, "rows": rows})
        if args.only == "losses":
            show_losses(sites, trained)
        for rate in setting.rates:
            if measured := link(setting, sites, rate, peer=peer, measures=args.only != "losses"):
                rows = rows_of(measured, trained, setting)
                show(sites, rate, rows)
                links.append({"sites": sites, "rate": rate, "rows": rows})
                gates += gates_of(f"{sites} sites, {rate}", rows, setting.every, quick=args.quick)
    content = {"setting": dataclasses.asdict(setting), "torchft": torchft_loop.version()}
    return report.finish(gates, args.json, content | {"links": links, "losses": of_sites})
