"""Convergence against bytes: each method next to its exact baseline, with gates.

    python benchmarks convergence fsdp|fsdp_variants|fsdp_tables|ddp|diloco|diloco_residuals|diloco_table1|
        diloco_unequal|aq|aq_replicas|split_learning|subspace|subspace_depth|seed_replay|seed_replay_lora
        [--quick] [--seeds N] [--data FILE|DIR] [--only PART] [--runs DIR] [--json FILE] [--plot FILE]
        [--seconds FILE [--curves FILE]]

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
import pictures
import report
import text

from convergence import link_curves
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
    parser.add_argument("--curves", type=Path, metavar="FILE", help="with --seconds: of a JSON's runs; trains nothing")
    args = parser.parse_args()
    if args.curves and not (args.seconds and args.method in link_curves.SIMULATED):
        parser.error(f"--curves: expected --seconds and one of {', '.join(link_curves.SIMULATED)}, got {args.method!r}")
    if args.seconds and args.only and args.method not in link_curves.SIMULATED:
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
    """Draws seed 0's curves of the runs that counted bytes, the short one on gloo left out; `names`: of these only."""
    import plot

    longest = max(len(curve["step"]) for curve in curves)
    chosen = [curve for curve in curves if curve["seed"] == 0 and len(curve["step"]) == longest and curve["bytes"][-1]]
    chosen = [curve for curve in chosen if names is None or curve["name"] in names]
    lines = [plot.Curve(curve["name"], curve["loss"], curve["bytes"]) for curve in chosen]
    plot.loss_against_bytes(lines, path, title=title)
    pictures.shrink(path)


def _seconds(method: str, content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Loss against seconds of a JSON's curves, drawn to `path`: what the JSON has of it; {} where nothing is drawn."""
    found: dict[str, Any] = {}
    if times := link_curves.step_seconds(method, content):
        found["step_seconds"] = times
        if method in link_curves.SIMULATED:
            found["compared"] = link_curves.SIMULATED[method].compared(content, times)
        link_curves.draw(content["curves"], times, path, method)
    return found


def _of_recorded(method: str, recorded: Path, seconds: Path, json_file: Path | None) -> int:
    """Loss against seconds of the runs of a JSON; SystemExit with a sentence where it is another method's."""
    content = json.loads(recorded.read_text())
    if content.get("method") != method:
        raise SystemExit(f"convergence: --curves: expected a JSON of {method}, got one of {content.get('method')!r}")
    of = content["versions"].get("commit", "unknown")
    print(report.heading(f"convergence {method}, curves of {recorded.name}", trained_at=of[:8]))
    found = _seconds(method, content, seconds)
    return report.finish([], json_file, {"method": method, "trained_at": of, **found})


def main() -> int:
    """Runs the method and reports."""
    args = parse()
    if args.curves:
        return _of_recorded(args.method, args.curves, args.seconds, args.json)
    options = {"quick": args.quick, "seeds": args.seeds}
    if args.text:
        options["text"] = "{name}, {bytes} bytes, sha256 {sha256}".format(**args.text)
    print(report.heading(f"convergence {args.method}", **options))
    try:
        chosen = {"only": args.only} if args.only else {}
        content, gates = METHODS[args.method](quick=args.quick, seeds=args.seeds, **chosen)
    except RuntimeError as error:
        raise SystemExit(f"convergence: {error}") from None
    if args.plot:
        drawn = DRAWN.get(args.method, "curves")
        if not content.get(drawn):
            print(f"# no plot: {args.only} has no {drawn}")
        elif args.method in DRAWS:
            DRAWS[args.method](content[drawn], args.plot, title=f"{args.method}, seed 0")
        else:
            draw(content["curves"], args.plot, title=f"{args.method}, seed 0", names=content.get("drawn"))
    if args.seconds:
        content |= _seconds(args.method, content, args.seconds)
    if "curves" in content:
        content["curves"] = [thinned(curve) for curve in content["curves"]]
    return report.finish(gates, args.json, {"method": args.method, "quick": args.quick, "text": args.text, **content})
