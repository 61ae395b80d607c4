"""Steps to a loss times seconds a step, for pipelines shaped like Protocol NanoGPT, by method, rate and delay.

    python benchmarks nanogpt_wan [--quick] [--curves FILE] [--json FILE]

Steps come from the curves of `convergence subspace`, seconds from stages that are measured here and from the schedule's
simulation, which `subspace_links` compares real links with. benchmarks/results/nanogpt_wan.md has the definitions.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
from result_pages import RESULTS
from tables import Columns

from subspace import stage_seconds, target_steps, wan

SHOWN = (0.4, 0.6, 0.8)  # of the free run's steps, in the table of steps
TARGETS = SHOWN[1:]  # of scores: one that most methods reach, and one that few do
Steps = dict[str, float | None]  # by run; None: it does not reach the target
HERE, RECORD = "this machine", "the record's machines"


def show_steps(curves: target_steps.Curves) -> tuple[dict[float, Steps], dict[str, Any]]:
    """A line a method; the methods' steps to each of SHOWN, and the JSON."""
    names = [method.run for method in wan.METHODS]
    steps = {share: target_steps.of_runs(curves, share, names) for share in SHOWN}
    print(
        "# steps to the training loss that the free run has at a share of its steps. "
        "validation: by exact messages at the end, over the free run's"
    )
    at = " | ".join(f"at {share:.0%} 10.1f" for share in SHOWN)
    columns = Columns(f"method 30 | run, d = 256 28 | bytes each way 16.1f | validation 12.3f | {at}")
    print(columns.heading())
    rows = []
    for method in (method for method in wan.METHODS if method.run in steps[SHOWN[0]]):
        cells = [of_share[method.run] for of_share in steps.values()]
        validation = target_steps.validation(curves, method.run)
        row = {"method": method.name, "token_bytes": method.token_bytes(), "validation": validation, "steps": cells}
        rows.append(row)
        print(columns.row(method.name, method.run, method.token_bytes(), validation, *cells))
    return steps, {"shares": SHOWN, "steps": rows}


def show_scores(steps: dict[float, Steps], speeds: dict[str, wan.Seconds]) -> dict[str, Any]:
    """The methods on the records' link, the records, and which method wins on others; the JSON."""
    return {
        "scores": show_methods(steps, speeds),
        "records": show_records(speeds[RECORD]),
        "winners": show_winners(steps, speeds),
    }


def show_methods(steps: dict[float, Steps], speeds: dict[str, wan.Seconds]) -> list[dict[str, Any]]:
    """A line a method on the records' link, with its score at each of TARGETS."""
    print(
        f"# {wan.RATE / 1e6:.0f} Mbit/s, {wan.DELAY * 1e3:.0f} ms, {wan.STAGES} stages, 1F1B, {wan.MICRO_BATCHES} micro-batches, "
        f"{wan.TOKENS} tokens a step"
    )
    hours = " | ".join(f"hours at {share:.0%} 14.3f | x bf16 9.3f" for share in TARGETS)
    columns = Columns(f"stages of 24 | method 28 | s a step 10.2f | {hours}")
    print(columns.heading())
    rows = []
    for speed, seconds in speeds.items():
        found = {share: wan.scores(steps[share], seconds, rate=wan.RATE, delay=wan.DELAY) for share in TARGETS}
        for scores in zip(*found.values(), strict=True):
            shown: list[float | None] = []
            for share, score in zip(TARGETS, scores, strict=True):
                hours = None if score.total_s is None else score.total_s / 3600
                times = over_bf16(score, found[share])
                rows.append(
                    {"stages": speed, "share": share, **dataclasses.asdict(score), "hours": hours, "times": times}
                )
                shown += [hours, times]
            print(columns.row(speed, scores[0].name, scores[0].seconds, *shown))
    return rows


def over_bf16(score: wan.Score, found: Sequence[wan.Score]) -> float | None:
    """A score over that of uncompressed bf16, the first one."""
    base = found[0].total_s
    return None if score.total_s is None or base is None else score.total_s / base


def show_records(seconds: wan.Seconds) -> list[dict[str, Any]]:
    """A line a record."""
    print(
        "# simulated: a fit of three choices (tokens, micro-batches, speed) to the two published numbers, no prediction"
    )
    columns = Columns(
        "published, bytes a token 30 | both ways 14 | steps 8 | s a step 10.1f | simulated 11.2f | hours 9.2f"
    )
    print(columns.heading())
    rows = []
    for record in wan.RECORDS:
        simulated = wan.step_s(record.token_bytes / 2, seconds[record.kind])
        hours = record.steps * record.seconds / 3600
        rows.append(dataclasses.asdict(record) | {"simulated_s": simulated, "hours": hours})
        print(columns.row(record.name, record.token_bytes, record.steps, record.seconds, simulated, hours))
    return rows


def show_winners(steps: dict[float, Steps], speeds: dict[str, wan.Seconds]) -> list[dict[str, Any]]:
    """A line a link, with the method that has the least score at each of TARGETS."""
    print("# least steps x seconds, over bf16's; records: the same of theirs, k = 160 over bf16, by their own steps")
    winners = " | ".join(f"winner at {share:.0%} 29 | x bf16 8.3f" for share in TARGETS)
    columns = Columns(f"stages of 22 | Mbit/s 7.0f | ms 5.0f | {winners} | records 10.3f")
    print(columns.heading())
    rows = []
    for speed, seconds in speeds.items():
        for rate, delay in itertools.product(wan.RATES, wan.DELAYS):
            records = wan.records_ratio(seconds, rate=rate, delay=delay)
            shown: list[Any] = []
            for share in TARGETS:
                found = wan.scores(steps[share], seconds, rate=rate, delay=delay)
                best = wan.winner(found)
                times = over_bf16(best, found)
                row = {"stages": speed, "rate": rate, "delay_s": delay, "share": share, "winner": best.name}
                rows.append(row | {"times": times, "records": records})
                shown += [best.name, times]
            print(columns.row(speed, rate / 1e6, delay * 1e3, *shown, records))
    return rows


def measure_scores(curves: target_steps.Curves, *, quick: bool) -> dict[str, Any]:
    """Steps, stages and scores."""
    steps, content = show_steps(curves)
    sizes = {"width": wan.WIDTH, "vocabulary": stage_seconds.VOCABULARY, "context": stage_seconds.CONTEXT}
    if quick:
        sizes = {"width": 128, "vocabulary": 512, "context": 64}
    here = stage_seconds.measure(**sizes, repetitions=1 if quick else 5)
    factor = wan.factor_of_record(here)
    speeds = {HERE: here, RECORD: {kind: stages.faster(factor) for kind, stages in here.items()}}
    print(
        f"# stages of one block, {', '.join(f'{name} {size}' for name, size in sizes.items())}; the record's machines are "
        f"{factor:.1f} times as fast"
    )
    columns = Columns("stages of 24 | kind 14 | stage 15 | forward us 14.3f | backward us 14.3f")
    print(f"{columns.heading()}   a token")
    for speed, by_kind in speeds.items():
        for kind, stages in by_kind.items():
            for where, *both in zip(("in the middle", "last"), stages.forward, stages.backward, strict=True):
                print(columns.row(speed, kind, where, *(1e6 * s for s in both)))
    stages_json = {
        speed: {kind: dataclasses.asdict(of) for kind, of in by_kind.items()} for speed, by_kind in speeds.items()
    }
    return {**content, "sizes": sizes, "factor": factor, "stages": stages_json, **show_scores(steps, speeds)}


def main() -> int:
    """Scores, and reports."""
    parser = report.arguments(__doc__, quick="small stages")
    parser.add_argument("--curves", type=Path, default=RESULTS / "subspace.json", help="of `convergence subspace`")
    args = parser.parse_args()
    if not args.curves.exists():
        parser.error(f"--curves: expected the JSON of `benchmarks convergence subspace --json`, found no {args.curves}")
    options = {"quick": args.quick, "curves": args.curves.name}
    print(report.heading("nanogpt_wan", **options))
    curves = json.loads(args.curves.read_text())["curves"]
    return report.finish([], args.json, {**options, **measure_scores(curves, quick=args.quick)})
