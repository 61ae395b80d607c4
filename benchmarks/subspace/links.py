"""Subspace pipelines on a link so slow that uncompressed messages take 15 times as long as computing, and generation on it.

    python benchmarks subspace_links [--quick] [--only WORD…] [--json FILE]        # as root

benchmarks/results/subspace_links.md has the definitions. A setting is measured on the unlimited link first. The rate of the slow
one is chosen such that a step's uncompressed activations and gradients at one boundary would take TIMES a step's compute on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import report
from linklab.link import SEGMENT_FRAME, SEGMENT_PAYLOAD
from tables import Columns

from subspace.link_cases import Case, Setting
from subspace.link_measure import Measured, measure

TIMES = 15
UNCOMPRESSED, TENTH = "uncompressed", "k = 10"
RATIOS = ("k = 64", "k = 128")  # d / k = 16 and 8
CASES = (
    Case(UNCOMPRESSED, "whole", generates=1),
    Case(TENTH, "constrained", 10, generates=3),
    Case(RATIOS[0], "constrained", 64),
    Case(RATIOS[1], "constrained", 128),
    Case(f"{RATIOS[1]} in 8 bits", "constrained", 128, "minmax8:bucket=128"),
)
TOKEN_S = (0.015 / 256, 0.030 / 256)  # of a block that waits
GENERATED = (32, 512, 64)
FAST, SLOW, BOUND, GENERATES = 1.15, 10, 1.15, 0.85

COLUMNS = Columns(
    "messages 20 | bytes a token 14.1f | unlimited ms 14.1f | slow ms 10.1f | least 9.1f | most 9.1f | bound 9.1f | "
    "x bound 9.3f | x unlimited 13.3f"
)
GENERATION = Columns("tokens a second 34 | unlimited 12.1f | slow 12.1f | share 9.3f | x uncompressed, slow 22.2f")


def settings(*, quick: bool) -> list[Setting]:
    """Two and four stages that wait, and two that compute, on a core each."""
    waits = Setting(2, (1, 256), CASES, TOKEN_S, generate=GENERATED)
    if quick:
        return [dataclasses.replace(waits, cases=CASES[:3], repetitions=1, generate=(4, 32, 4))]
    computes = Setting(2, (1, 64), CASES, None, repetitions=3, generate=GENERATED)
    return [waits, dataclasses.replace(waits, stages=4, generate=None), computes]


def slow_rate(unlimited: Measured) -> str:
    """The rate of the slow link, headers included, in kbit/s."""
    bytes_per_s = unlimited.uncompressed_bytes / (TIMES * unlimited.compute_s)
    return f"{bytes_per_s * 8 * SEGMENT_FRAME / SEGMENT_PAYLOAD / 1e3:.0f}kbit"


def speeds(setting: Setting, measured: Measured, case: str) -> tuple[float, float]:
    """Tokens a second of prompts, and of what is generated behind them."""
    assert setting.generate is not None
    prompts, length, _ = setting.generate
    prompts_s, token_s = measured.generated[case]
    return prompts * length / prompts_s, prompts / token_s


def show_generation(setting: Setting, unlimited: Measured, slow: Measured) -> list[dict[str, Any]]:
    """Prints tokens a second on both links, and how many times an uncompressed boundary's; returns the JSON's rows."""
    print(GENERATION.heading())
    rows = []
    base = speeds(setting, slow, UNCOMPRESSED)
    for case in slow.generated:
        both = zip(speeds(setting, unlimited, case), speeds(setting, slow, case), strict=True)
        for what, uncompressed, (here, there) in zip(("prompts", "generated"), base, both, strict=True):
            row = {"messages": case, "what": what, "unlimited": here, "slow": there, "share": there / here}
            rows.append(row | {"times": there / uncompressed})
            print(GENERATION.row(f"{case}, {what}", here, there, there / here, there / uncompressed), flush=True)
    return rows


def show(setting: Setting, unlimited: Measured, slow: Measured) -> dict[str, Any]:
    """Prints a setting; returns it as the JSON has it."""
    times = ", ".join(f"{1e3 * s:.1f}" for s in (*unlimited.forward_s, *unlimited.backward_s))
    communication_s = TIMES * unlimited.compute_s
    print(
        f"# {setting.name}, micro-batches of {setting.shape[0]}x{setting.shape[1]} tokens: forwards and backwards by themselves "
        f"take {times} ms\n# a step's compute {1e3 * unlimited.compute_s:.1f} ms, its uncompressed messages "
        f"{unlimited.uncompressed_bytes / 1e6:.2f} MB, {communication_s:.2f} s at {slow.link.split()[0]}: "
        f"{TIMES} times the compute"
    )
    print(COLUMNS.heading())
    rows = []
    for here, there in zip(unlimited.rows, slow.rows, strict=True):
        token_bytes = there.activation / (setting.shape[0] * setting.shape[1])
        row = {
            "messages": here.name,
            "token_bytes": token_bytes,
            "unlimited_s": here.seconds,
            "slow_s": there.seconds,
            "times": there.seconds / here.seconds,
        }
        rows.append(row)
        ms = (1e3 * s for s in (here.seconds, there.seconds, there.least_s, there.most_s, there.bound_s))
        print(COLUMNS.row(here.name, token_bytes, *ms, there.ratio, row["times"]), flush=True)
    content = {"name": setting.name, "unlimited": unlimited.to_json(), "slow": slow.to_json(), "rows": rows}
    if setting.generate:
        content["generation"] = show_generation(setting, unlimited, slow)
    return content


def gates(content: dict[str, Any], slow: Measured) -> list[report.Gate]:
    """Of one setting's rows."""
    name, times = content["name"], {row["messages"]: row["times"] for row in content["rows"]}
    found = [
        report.Gate(f"{name}, {TENTH} of 1024: slow step / unlimited", times[TENTH], "<=", FAST),
        report.Gate(f"{name}, {UNCOMPRESSED}: slow step / unlimited", times[UNCOMPRESSED], ">=", SLOW),
    ]
    rows = {row.name: row for row in slow.rows}
    found += [
        report.Gate(f"{name}, {case} of 1024: slow step / bound", rows[case].ratio, "<=", BOUND)
        for case in RATIOS
        if case in rows
    ]
    found += [
        report.Gate(f"{name}: tokens a second, {of['what']}, slow / unlimited", of["share"], ">=", GENERATES)
        for of in content.get("generation", ())
        if of["messages"] == TENTH
    ]
    found.append(report.Gate(f"{name}: a TCP stream's rate / the link's", slow.goodput_share or 0, ">=", 0.97))
    return found


def run(chosen: Sequence[Setting]) -> tuple[list[dict[str, Any]], list[report.Gate]]:
    """Measures settings, each on both links."""
    contents, held = [], []
    for setting in chosen:
        unlimited = measure(setting)
        slow = measure(dataclasses.replace(setting, rate=slow_rate(unlimited)))
        contents.append(show(setting, unlimited, slow))
        held += gates(contents[-1], slow)
    return contents, held


def main() -> int:
    """Runs every setting, and reports."""
    parser = report.arguments(__doc__, quick="two stages that wait, some cases, once")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="of settings: those whose names hold one")
    args = parser.parse_args()
    chosen = [s for s in settings(quick=args.quick) if not args.only or any(word in s.name for word in args.only)]
    options = {"width": 1024, "times": TIMES, "quick": args.quick}
    print(report.heading("subspace_links", **options))
    contents, held = run(chosen)
    return report.finish(held, args.json, {**options, "settings": contents})
