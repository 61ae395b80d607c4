"""What a site that stands still costs the others: seconds and loss, with a quorum and without.

    python benchmarks diloco_late [--quick] [--seeds 2] [--rate 100mbit] [--sites 4] [--json FILE]        # as root

On hosts of the lab every site trains with `lc.DiLoCoX` over a `lc.Membership`, by steps of the same length. One site is
stopped (SIGSTOP) in its fifth interval, for as long as ten intervals take, and goes on. `lost` is what the others' intervals
took longer than usual until that site was back, its return included, by ten of the usual length; the loss is that of the outer
parameters after the same number of outer steps in all cases.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import Any

import paired
import report
from linklab import Lab
from linklab.job import run_on_hosts
from tables import Columns

BEFORE, STOPPED, AFTER = 4, 10, 6  # intervals
COLUMNS = Columns(
    "case 24 | seed 5 | interval s 11.3f | lost 7.3f | lost s 8.2f | back after 11.0f | loss 8.4f | late samples 13.0f"
)
CASES: dict[str, dict[str, Any]] = {
    "no site is late": {"stops": False, "quorum": True},
    "one stops, quorum": {"stops": True, "quorum": True},
    "one stops, no quorum": {"stops": True, "quorum": False},
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """`step_s`: seconds of an inner step, which waits where computing takes less."""

    model: str = "base"
    batch: int = 8
    every: int = 100
    step_s: float = 0.15


def row_of(case: str, seed: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of what the sites wrote; the first site's clock counts, which is never late. `back`: intervals until all sites were in
    the group again, or ten.
    """
    times, sites = ranks[0]["times"], ranks[0]["sites"]
    usual = statistics.median(after - before for before, after in itertools.pairwise(times[:BEFORE]))
    away = [i for i, count in enumerate(sites) if count < len(ranks)]
    back = max([*(i + 2 - BEFORE for i in away), STOPPED])
    lost_s = times[BEFORE - 1 + back] - times[BEFORE - 1] - back * usual
    return {
        "case": case,
        "seed": seed,
        "interval_s": usual,
        "lost": lost_s / (STOPPED * usual),
        "lost_s": lost_s,
        "back": back,
        "loss": ranks[0]["loss"],
        "late_samples": ranks[-1]["late_samples"],
    }


def main() -> int:
    """Measures and reports."""
    parser = report.arguments(__doc__, quick="short intervals, one seed: that it works", seeds=2)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--sites", type=report.positive, default=4)
    args = parser.parse_args()
    setting = dataclasses.replace(Setting(), every=10, step_s=0.05) if args.quick else Setting()
    seeds = 1 if args.quick else args.seeds
    print(report.heading("diloco_late", sites=args.sites, rate=args.rate, **dataclasses.asdict(setting)), flush=True)
    print(COLUMNS.heading())
    rows = []
    for seed in range(seeds):
        for case, options in CASES.items():
            if seed and not options["quorum"]:
                continue  # of seconds alone
            job = {**dataclasses.asdict(setting), **options, "seed": seed, "steps": BEFORE + STOPPED + AFTER}
            with Lab(hosts=args.sites, rate=args.rate) as lab:
                row = row_of(case, seed, run_on_hosts(lab, "diloco.late_rank", {**job, "stopped": STOPPED}))
            print(COLUMNS.row(*row.values()), flush=True)
            rows.append(row)
    of = {case: [row for row in rows if row["case"] == case] for case in CASES}
    none, quorum = list(of.values())[:2]
    gates = [
        report.Gate("one stops, quorum: late samples that count, least", min(r["late_samples"] for r in quorum), ">", 0)
    ]
    if not args.quick:
        lost = statistics.median(row["lost"] for row in quorum)
        loss = paired.ratio(float, [row["loss"] for row in quorum], [row["loss"] for row in none])
        gates.append(report.Gate("one stops, quorum: time lost / ten intervals, median", lost, "<=", 0.02))
        gates.append(report.Gate("one stops, quorum: loss / that without a late site", loss.mean, "<=", 1.005))
    return report.finish(gates, args.json, {"setting": dataclasses.asdict(setting), "sites": args.sites, "rows": rows})
