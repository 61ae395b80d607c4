"""Convergence against bytes: each method next to its exact baseline, with gates.

    python benchmarks convergence fsdp|fsdp_variants|fsdp_tables|ddp|diloco|diloco_bits|diloco_rates|aq|
        aq_replicas|split_learning|subspace|seed_replay
        [--quick] [--seeds N] [--data FILE|DIR] [--only PART] [--runs DIR] [--json FILE] [--plot FILE]
        [--seconds FILE] [--curves FILE]

Prints a row a run and a line a gate; the exit status is 1 when a gate fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import kept
import report
import text

from convergence import plots
from convergence.ddp import runs as ddp
from convergence.diloco import presets as diloco_presets
from convergence.diloco import runs as diloco
from convergence.fsdp import runs as fsdp
from convergence.fsdp import tables as fsdp_tables
from convergence.fsdp import variants as fsdp_variants
from convergence.pipeline import link as pipeline_link
from convergence.pipeline import replicas as pipeline_replicas
from convergence.pipeline import runs as pipeline
from convergence.pipeline import split as pipeline_split
from convergence.seed_replay import runs as seed_replay
from convergence.subspace import presets as subspace_presets
from convergence.subspace import ratios as subspace_ratios
from convergence.subspace import runs as subspace


@dataclasses.dataclass(frozen=True)
class Method:
    """How a method is measured.

    Attributes:
        title: Of its pictures.
        measure: Runs everything; returns the JSON's content and the gates.
        seeds: Paired ones, unless --quick or --seeds.
        parts: That --only can name.
        has_text: Whether it trains on one.
        drawn: The runs in the picture of bytes, of those that are there; empty: all.
        on_links: Has `step_seconds` and `compared`, for --seconds; None: there are none.
    """

    title: str
    measure: Callable[..., tuple[dict[str, Any], list[report.Gate]]]
    seeds: int = 5
    parts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    has_text: bool = True
    drawn: Sequence[str] = ()
    on_links: ModuleType | None = None


SEED_REPLAY = ("byte", "sign", "best η", "send_full_grad", "DDP", "DDP, best rate", "FedAvg")
METHODS = {
    "fsdp": Method("FSDP2, two ranks: exact and with 8 bits", fsdp.measure),
    "fsdp_variants": Method(
        "FSDP2, two ranks: fewer bits, and other ways to round", fsdp_variants.measure, drawn=fsdp_variants.VARIANTS
    ),
    "fsdp_tables": Method(
        "FSDP2, two hosts, 10.7 million parameters",
        fsdp_tables.measure,
        parts=fsdp_tables.PARTS,
        on_links=fsdp_tables,
    ),
    "ddp": Method("DDP, two ranks: exact, 4 bits, and factors of rank 4", ddp.measure),
    "diloco": Method("Outer loops: DiLoCoX and other methods, two ranks", diloco.measure, drawn=diloco_presets.DRAWN),
    "diloco_bits": Method("Outer loops: the fewest bytes at DiLoCo's loss", diloco.measure_bits, 3),
    "diloco_rates": Method("Outer loops: the outer rate by the number of ranks", diloco.measure_rates, 3),
    "aq": Method(
        "Pipelines: exact messages, codes, and codes of changes (AQ-SGD)",
        pipeline.measure,
        3,
        pipeline.PARTS,
        drawn=pipeline.DRAWN,
        on_links=pipeline_link,
    ),
    "aq_replicas": Method(
        "Two replicas of a pipeline: both kinds of messages coded",
        pipeline_replicas.measure,
        3,
        on_links=pipeline_link,
    ),
    "split_learning": Method("Split learning on Fashion-MNIST", pipeline_split.measure, 3, has_text=False),
    "subspace": Method(
        "Boundaries of a pipeline: subspaces, and codes of all numbers",
        subspace.measure,
        3,
        subspace.PARTS,
        drawn=subspace_presets.DRAWN,
        on_links=subspace_ratios,
    ),
    "seed_replay": Method(
        "Seed replay, next to DDP and averaged parameters", seed_replay.measure, has_text=False, drawn=SEED_REPLAY
    ),
}
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
    """Reads and checks the command line; `chosen` is the method, `about_text` its text or None."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("method", metavar="METHOD", choices=METHODS, help=f"one of: {', '.join(METHODS)}")
    parser.add_argument("--quick", action="store_true", help="a subset of about a minute by the same code")
    parser.add_argument("--seeds", type=int, help="paired seeds (3 or 5, with --quick 1)")
    parser.add_argument("--data", type=Path, metavar="FILE|DIR", help="the text (default: Python's own library)")
    parser.add_argument("--only", metavar="PART", default="", help="of a method that has parts, one of them")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep each run there, and take what is there already")
    parser.add_argument("--json", type=Path, help="versions, machine, configurations, curves and gates")
    parser.add_argument("--plot", type=Path, help="loss against bytes (PNG)")
    parser.add_argument("--seconds", type=Path, help="loss against seconds on links, recorded or simulated (PNG)")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="draw the runs of this JSON; trains nothing")
    args = parser.parse_args()
    args.chosen = METHODS[args.method]
    if args.seconds and not args.chosen.on_links:
        on_links = ", ".join(name for name, method in METHODS.items() if method.on_links)
        parser.error(f"--seconds: expected one of {on_links}, got {args.method!r}")
    if args.curves and not (args.seconds or args.plot):
        parser.error("--curves: expected --plot or --seconds, got neither")
    if args.seeds is None:
        args.seeds = 1 if args.quick else args.chosen.seeds
    if args.seeds < 1:
        parser.error(f"--seeds: expected a positive number, got {args.seeds}")
    if args.only and args.only not in args.chosen.parts:
        parts = " or ".join(args.chosen.parts) or f"none of {args.method}"
        parser.error(f"--only: expected {parts}, got {args.only!r}")
    if args.data and not args.chosen.has_text:
        parser.error(f"--data: expected a method that trains on a text, got {args.method}, which has none")
    text.choose(args.data)
    try:
        kept.choose(args.runs)
        args.about_text = text.about() if args.chosen.has_text else None
    except ValueError as error:
        parser.error(str(error))
    return args


def pictures(args: argparse.Namespace, content: dict[str, Any]) -> dict[str, Any]:
    """Draws what --plot and --seconds ask for; returns what the JSON has of the latter, {} where nothing is drawn."""
    if args.plot and content.get("curves"):
        plots.bytes_sent(content["curves"], args.plot, title=args.chosen.title, names=args.chosen.drawn)
    elif args.plot:
        print(f"# no plot: {args.only} has no curves")
    links: Any = args.chosen.on_links
    times = links.step_seconds(content) if args.seconds else {}
    if not times:
        return {}
    plots.seconds(content["curves"], times, args.seconds, args.chosen.title)
    return {"step_seconds": times, "compared": links.compared(content, times)}


def of_recorded(args: argparse.Namespace) -> int:
    """Draws the runs of a JSON; SystemExit with a sentence where it is another method's."""
    content = json.loads(args.curves.read_text())
    if content.get("method") != args.method:
        raise SystemExit(f"convergence: --curves: expected a JSON of {args.method}, got {content.get('method')!r}")
    of = content["versions"].get("commit", "unknown")
    print(report.heading(f"convergence {args.method}, curves of {args.curves.name}", trained_at=of[:8]))
    return report.finish([], args.json, {"method": args.method, "trained_at": of, **pictures(args, content)})


def main() -> int:
    """Runs the method and reports."""
    args = parse()
    if args.curves:
        return of_recorded(args)
    options = {"quick": args.quick, "seeds": args.seeds}
    if args.about_text:
        options["text"] = "{name}, {bytes} bytes, sha256 {sha256}".format(**args.about_text)
    print(report.heading(f"convergence {args.method}", **options))
    try:
        part = {"only": args.only} if args.only else {}
        content, gates = args.chosen.measure(quick=args.quick, seeds=args.seeds, **part)
    except RuntimeError as error:
        raise SystemExit(f"convergence: {error}") from None
    content |= pictures(args, content)
    if "curves" in content:
        content["curves"] = [thinned(curve) for curve in content["curves"]]
    about = {"method": args.method, "quick": args.quick, "text": args.about_text}
    return report.finish(gates, args.json, about | content)
