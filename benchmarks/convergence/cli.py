"""Convergence against bytes: each method next to its exact baseline, with gates.

    python benchmarks convergence fsdp|fsdp_variants|fsdp_tables|ddp|diloco|diloco_residuals|diloco_table1|
        diloco_unequal|aq|aq_replicas|split_learning|subspace|subspace_depth|seed_replay|seed_replay_lora
        [--quick] [--seeds N] [--data FILE|DIR] [--only PART] [--runs DIR] [--json FILE] [--plot FILE]
        [--seconds FILE] [--curves FILE]

Prints a row a run and a line a gate; the exit status is 1 when a gate fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kept
import report
import text

from convergence import link_curves, panels
from convergence.ddp import runs as ddp_runs
from convergence.diloco import plot as diloco_plot
from convergence.diloco import residuals as diloco_residuals
from convergence.diloco import runs as diloco_runs
from convergence.diloco import table1 as diloco_table1
from convergence.diloco import unequal as diloco_unequal
from convergence.fsdp import errors as fsdp_errors
from convergence.fsdp import runs as fsdp_runs
from convergence.fsdp import tables as fsdp_tables
from convergence.fsdp import variants as fsdp_variants
from convergence.pipeline import plot as pipeline_plot
from convergence.pipeline import replicas as pipeline_replicas
from convergence.pipeline import runs as pipeline_runs
from convergence.pipeline import split as pipeline_split
from convergence.seed_replay import lora as seed_replay_lora
from convergence.seed_replay import plot as seed_replay_plot
from convergence.seed_replay import runs as seed_replay_runs
from convergence.subspace import depth as subspace_depth
from convergence.subspace import plot as subspace_plot
from convergence.subspace import runs as subspace_runs

METHODS: dict[str, Callable] = {
    "fsdp": fsdp_runs.measure,
    "fsdp_variants": fsdp_variants.measure,
    "fsdp_tables": fsdp_tables.measure,
    "ddp": ddp_runs.measure,
    "diloco": diloco_runs.measure,
    "diloco_residuals": diloco_residuals.measure,
    "diloco_table1": diloco_table1.measure,
    "diloco_unequal": diloco_unequal.measure,
    "aq": pipeline_runs.measure,
    "aq_replicas": pipeline_replicas.measure,
    "split_learning": pipeline_split.measure,
    "subspace": subspace_runs.measure,
    "subspace_depth": subspace_depth.measure,
    "seed_replay": seed_replay_runs.measure,
    "seed_replay_lora": seed_replay_lora.measure,
}
TITLES = {  # of the pictures; colours are means over seeds, with a band from the least to the most
    "fsdp": "FSDP2, two ranks: exact and with 8 bits",
    "fsdp_variants": "FSDP2, two ranks: fewer bits, and other ways to round",
    "fsdp_tables": "FSDP2, two hosts, 10.7 million parameters",
    "ddp": "DDP, two ranks: exact, 4 bits, and factors of rank 4",
    "diloco": "Outer loops: DiLoCoX and other methods, two ranks",
    "diloco_residuals": "DiLoCoX: residuals in 32 and in 8 bits",
    "diloco_table1": "Outer loops with the settings of DiLoCoX's Table 1",
    "diloco_unequal": "Two sites, one of them half as fast",
    "aq": "Pipelines: exact messages, codes, and codes of changes (AQ-SGD)",
    "aq_replicas": "Two replicas of a pipeline: both kinds of messages coded",
    "split_learning": "Split learning on Fashion-MNIST",
    "subspace": "Boundaries of a pipeline: subspaces, projections, and codes of all numbers",
    "subspace_depth": "Constrained decoders of 8, 16 and 32 blocks",
    "seed_replay": "Seed replay, next to DDP and averaged parameters",
    "seed_replay_lora": "Seed replay on adapters, next to DDP",
}
# Parts of methods that can be run by themselves.
PARTS: dict[str, Mapping[str, Any]] = {
    "fsdp_variants": fsdp_variants.PARTS,
    "fsdp_tables": fsdp_tables.PARTS,
    "aq": pipeline_runs.PARTS,
    "subspace": subspace_runs.PARTS,
}
SEEDS = {  # of other methods 5
    "aq": 3,
    "aq_replicas": 3,
    "split_learning": 3,
    "diloco_residuals": 3,
    "diloco_unequal": 3,
    "subspace": 3,
    "subspace_depth": 3,
}
WITHOUT_TEXT = ("seed_replay", "seed_replay_lora", "split_learning")
# In place of loss against bytes alone, and of what in place of curves.
DRAWS: dict[str, Callable] = {
    "fsdp_tables": fsdp_errors.draw,
    "diloco": diloco_plot.draw,
    "diloco_unequal": diloco_unequal.draw,
    "aq": pipeline_plot.draw,
    "subspace": subspace_plot.draw,
    "seed_replay": seed_replay_plot.draw,
}
DRAWN = {"fsdp_tables": "errors"}


POINTS = 100  # of a curve in the JSON, at most


def thinned(curve: Mapping[str, Any]) -> dict[str, Any]:
    """A curve of at most POINTS points: the first one, and then each the last of some, with their mean loss."""
    steps = curve["step"]
    if len(steps) <= POINTS:
        return dict(curve)
    together = -(-(len(steps) - 1) // (POINTS - 1))
    ends = [1, *range(1 + together, len(steps), together), len(steps)]
    runs = list(zip([0, *ends], ends, strict=False))
    found = dict(curve)
    for name, values in curve.items():
        if isinstance(values, list) and len(values) == len(steps):
            mean = name == "loss"
            found[name] = [round(statistics.mean(values[a:b]), 5) if mean else values[b - 1] for a, b in runs]
    return found


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("method", metavar="METHOD", help=f"one of: {', '.join(METHODS)}")
    parser.add_argument("--quick", action="store_true", help="a subset of about a minute by the same code")
    parser.add_argument(
        "--seeds",
        type=int,
        help=f"paired seeds (default 5, of {', '.join(SEEDS)} 3, with --quick 1)",
    )
    parser.add_argument("--data", type=Path, metavar="FILE|DIR", help="the text (default: Python's own library)")
    parser.add_argument("--only", metavar="PART", default="", help="of a method that has parts, one of them")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep each run there, and take what is there already")
    parser.add_argument("--json", type=Path, help="versions, machine, configurations, curves and gates")
    parser.add_argument("--plot", type=Path, help="loss against bytes (PNG)")
    parser.add_argument(
        "--seconds",
        type=Path,
        help="loss against seconds on links of some rates (PNG): as root, of pipelines simulated",
    )
    parser.add_argument("--curves", type=Path, metavar="FILE", help="draw the runs of this JSON; trains nothing")
    args = parser.parse_args()
    if args.curves and not (args.seconds or args.plot):
        parser.error("--curves: expected --seconds or --plot, got neither")
    if args.seconds and args.only and args.method not in (*link_curves.SIMULATED, "fsdp_tables"):
        parser.error(f"--seconds: expected a whole method, got --only {args.only}")
    if args.seconds and args.method in METHODS and args.method not in link_curves.DRAWN:
        parser.error(f"--seconds: expected one of {', '.join(link_curves.DRAWN)}, got {args.method!r}")
    if args.method not in METHODS:
        parser.error(f"METHOD: expected one of {', '.join(METHODS)}, got {args.method!r}")
    if args.seeds is None:
        args.seeds = 1 if args.quick else SEEDS.get(args.method, 5)
    if args.seeds < 1:
        parser.error(f"--seeds: expected a positive number, got {args.seeds}")
    parts = PARTS.get(args.method, {})
    if args.only and args.only not in parts:
        parser.error(f"--only: expected {' or '.join(parts) or f'none of {args.method}'}, got {args.only!r}")
    if args.data and args.method in WITHOUT_TEXT:
        parser.error(f"--data: expected a method that trains on a text, got {args.method}, which has none")
    text.choose(args.data)
    try:
        kept.choose(args.runs)
        args.text = None if args.method in WITHOUT_TEXT else text.about()
    except ValueError as error:
        parser.error(str(error))
    return args


def draw(curves: list[dict], path: Path, *, title: str, names: list[str] | None = None) -> None:
    """Draws loss against bytes of the runs that counted bytes, the short one on gloo left out; `names`: of these only."""
    longest = max(curve["step"][-1] for curve in curves)
    chosen = [curve for curve in curves if curve["step"][-1] == longest and curve["bytes"][-1]]
    runs = panels.by_name([curve for curve in chosen if names is None or curve["name"] in names])
    with panels.panels(path, 1, size=(7.2, 4.4), title=title) as (axes,):
        for name, of_seeds in runs.items():
            first = of_seeds[0]
            recent = 10 if first["step"][:2] == [1, 2] else 4
            sent = [total / 1e6 for total in first["bytes"]]
            panels.banded(axes, sent, [curve["loss"] for curve in of_seeds], recent=recent, label=name)
        totals = [of_seeds[0]["bytes"][-1] for of_seeds in runs.values()]
        if max(totals) > 5 * min(totals):
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0)
        axes.set_xlabel("sent by a rank (MB)")
        axes.set_ylabel("training loss (nats a byte)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def _pictures(args: argparse.Namespace, content: dict[str, Any]) -> dict[str, Any]:
    """Draws what --plot and --seconds ask for; returns what the JSON has of the latter, {} where nothing is drawn."""
    drawn, title = content.get(DRAWN.get(args.method, "curves")), TITLES[args.method]
    if args.plot and not drawn:
        print(f"# no plot: {args.only or args.method} has no {DRAWN[args.method]}")
    elif args.plot and args.method in DRAWS:
        DRAWS[args.method](drawn, args.plot, title=title)
    elif args.plot:
        draw(drawn, args.plot, title=title, names=content.get("drawn"))
    found: dict[str, Any] = {}
    if args.seconds and (times := link_curves.step_seconds(args.method, content)):
        found["step_seconds"] = times
        if args.method in link_curves.SIMULATED:
            found["compared"] = link_curves.SIMULATED[args.method].compared(content, times)
        link_curves.draw(content["curves"], times, args.seconds, title)
    return found


def _of_recorded(args: argparse.Namespace) -> int:
    """Draws the runs of a JSON; SystemExit with a sentence where it is another method's."""
    content = json.loads(args.curves.read_text())
    if content.get("method") != args.method:
        got = content.get("method")
        raise SystemExit(f"convergence: --curves: expected a JSON of {args.method}, got one of {got!r}")
    of = content["versions"].get("commit", "unknown")
    print(report.heading(f"convergence {args.method}, curves of {args.curves.name}", trained_at=of[:8]))
    return report.finish([], args.json, {"method": args.method, "trained_at": of, **_pictures(args, content)})


def main() -> int:
    """Runs the method and reports."""
    args = parse()
    if args.curves:
        return _of_recorded(args)
    options = {"quick": args.quick, "seeds": args.seeds}
    if args.text:
        options["text"] = "{name}, {bytes} bytes, sha256 {sha256}".format(**args.text)
    print(report.heading(f"convergence {args.method}", **options))
    try:
        chosen = {"only": args.only} if args.only else {}
        content, gates = METHODS[args.method](quick=args.quick, seeds=args.seeds, **chosen)
    except RuntimeError as error:
        raise SystemExit(f"convergence: {error}") from None
    content |= _pictures(args, content)
    if "curves" in content:
        content["curves"] = [thinned(curve) for curve in content["curves"]]
    return report.finish(gates, args.json, {"method": args.method, "quick": args.quick, "text": args.text, **content})
