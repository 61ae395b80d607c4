"""Whether the figures of the pages are those of the results: README.md's tables, and the blocks of benchmarks/results/*.md.

python benchmarks/figures.py            # exit status 1 where one is not, with the line and what the JSON says

A row of README.md's measured tables is found by how its line begins, and all figures of the line are compared. A block of a
result's page (`result_pages.py`) names its JSON, and has the same gates: names, values, bounds. Each figure of its rows is a
number of that JSON in some unit, at the precision it is printed with: what was mistyped or left from an earlier run is hardly
ever another one.
"""

from __future__ import annotations

import bisect
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import result_pages

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_FIGURE = re.compile(r"\d[\d,]*\.?\d*|\.\d+")
_GATE = re.compile(r"^(?:PASS|FAIL)  (.+?) +(\S+) +(<=|>=|<|>|==) (\S+)$", re.MULTILINE)
NO_JSON = {"noise_peers"}  # of which only the table was kept
# Figures of rows that are computed when they are printed, or were not kept: how many. Bytes by kind; kB a step of
# PowerSGD, whose steps differ; a largest share.
NOT_KEPT = {
    "qsdp": 15,
    "qsdp_variants": 47,
    "ddp": 5,
    "outer": 1,
}
_UNITS = (1, 1e-9, 1e-6, 1e-3, 1e-2, 1e3, 1e6, 1e9)


def load(name: str) -> dict[str, Any]:
    """A result by name."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def short(value: float, digits: int) -> str:
    """As the tables have it: no 0 before the point."""
    return f"{value:.{digits}f}".removeprefix("0") if value < 1 else f"{value:.{digits}f}"


def qsdp() -> dict[str, list[str]]:
    """The first table. Bytes by kind are in results of later runs than the one there is, which has their sum."""
    result = load("qsdp")
    runs = [curve for curve in result["curves"] if curve["name"] in ("exact", "W8G8/1024")]
    mean = {
        name: statistics.mean(c["perplexity"] for c in runs if c["name"] == name) for name in ("exact", "W8G8/1024")
    }
    gates = {gate["name"]: gate for gate in result["gates"]}
    ratio = gates["perplexity ratio W8G8 / exact, bound 1.01 + a standard error"]
    table = {
        "| validation perplexity, mean |": [
            *(f"{value:.3f}" for value in mean.values()),
            f"{ratio['value']:.4f}",
            f"{ratio['bound'] - 1.01:.4f}",
        ]
    }
    for kind in ("weights", "gradients"):
        fewer = f"{gates[f'bytes sent for {kind}, exact / W8G8']['value']:.2f}"
        sent = [f"{run[f'{kind}_bytes'] / 1e6:.1f}" for run in runs[:2] if f"{kind}_bytes" in run]
        table[f"| {kind} a rank sent |"] = [*sent, fewer]
    return table


def steps() -> dict[str, list[str]]:
    """The table of steps at 100 Mbit/s: seconds, and times as fast as gloo in float32."""
    rows = {row["name"]: row for name in ("steps_fsdp", "steps_ddp") for row in _only_link(name)}
    fsdp = {name: row["seconds"] for name, row in ((r["name"], r) for r in _only_link("steps_fsdp"))}
    ddp = {name: row["seconds"] for name, row in ((r["name"], r) for r in _only_link("steps_ddp"))}

    def times(name: str) -> str:
        return f"{rows[name]['speedup']:.1f}"

    hook, power, low = "gloo, torch's fp16 hook", "gloo, torch's PowerSGD rank 4", "lowcomm rank 4, sym8"
    exact = next(row for row in _only_link("steps_fsdp") if row["name"] == "lowcomm exact")
    return {
        "| gloo, float32 |": [f"{fsdp['gloo fp32']:.1f}", short(ddp["gloo fp32"], 2)],
        "| lowcomm, exact |": [
            f"{fsdp['lowcomm exact']:.1f}",
            f"{exact['speedup']:.1f}",
            short(ddp[hook], 2),
            times(hook),
        ],
        "| 8 bits (W8G8) |": [short(fsdp["lowcomm W8G8"], 2), times("lowcomm W8G8"), *_way(ddp, rows, "lowcomm sym4")],
        "| 4 bits (W4G4) |": [short(fsdp["lowcomm W4G4"], 2), times("lowcomm W4G4"), *_way(ddp, rows, power)],
        "| | | | lowcomm, rank 4": _way(ddp, rows, low),
    }


def ddp() -> dict[str, list[str]]:
    """The table of DDP's hooks: mean perplexity, loss beside another run's, times fewer bytes in the last steps."""
    result = load("ddp")
    gates = {gate["name"]: gate for gate in result["gates"]}

    def row(name: str, peer: str = "") -> list[str]:
        mean = statistics.mean(run["perplexity"] for run in result["curves"] if run["name"] == name)
        beside: list[str] = []
        if peer:
            gate = gates[f"loss, {name} - {peer}, bound one standard error"]
            beside = [short(gate["value"], 4), short(gate["bound"], 4)]
        fewer = _last_step(result, "exact") / _last_step(result, name)
        return [
            f"{mean:.3f}",
            *beside,
            *([] if name == "exact" else [f"{fewer:.1f}" if fewer < 30 else f"{fewer:.0f}"]),
        ]

    power = "PowerSGD rank 4"
    return {
        "| exact | 5": row("exact"),
        "| 4 bits, `sym4:bucket=128` |": row("sym4", "exact"),
        "| torch's PowerSGD, rank 4, factors in float32 |": row(power),
        "| rank 4, both factors in `sym8:bucket=128` |": row("rank 4, sym8", power),
        "| rank 4, P in `sym8`, R in `sym4` |": row("rank 4, sym8/sym4", power),
        "| rank 4, both in `sym4` |": row("rank 4, sym4", power),
    }


def dilocox() -> dict[str, list[str]]:
    """The table of what talks seldom, seed 0: loss, MB sent, times fewer than the all_reduce every step."""
    runs = {run["name"]: run for run in load("dilocox")["curves"] if run["seed"] == 0}
    whole = runs["all_reduce"]["bytes"][-1]

    def row(*names: str) -> list[str]:
        chosen = [runs[name] for name in names]
        fewer = [f"{whole / run['bytes'][-1]:.0f}" for run in chosen if run["name"] != "all_reduce"]
        sent = [f"{run['bytes'][-1] / 1e6:.1f}" for run in chosen]
        return [*(f"{run['validation']:.3f}" for run in chosen), *sent, *fewer]

    return {
        "| exact all_reduce every step |": row("all_reduce"),
        "| every 20 steps (DiLoCo) |": row("DiLoCo"),
        "| in 4 bits with error feedback; in 2 (`gauss2`) without |": row("DiLoCo, int4 EF", "DiLoCo, gauss2"),
        "| in 4 fragments of 4 bits (Streaming DiLoCo) |": row("Streaming DiLoCo"),
        "| factors of rank 16 in 4 bits with error feedback |": row("rank 16, int4 EF"),
        "| DiLoCoX, overlapped, rank and interval adaptive |": row("DiLoCoX"),
    }


def wrong_in_readme(text: str) -> Iterator[str]:
    """Rows of README.md that are not what results say."""
    lines = text.splitlines()
    for begin, expected in (qsdp() | steps() | ddp() | dilocox()).items():
        found = [line for line in lines if line.startswith(begin)]
        if len(found) != 1:
            yield f"README.md: expected one row that begins with {begin!r}, got {len(found)}"
            continue
        got = [figure for cell in found[0].split("|") if _is_measured(cell) for figure in _FIGURE.findall(cell)]
        if begin.endswith("a rank sent |") and len(expected) == 1:
            got = got[-1:]  # the sums are compared below
        if got != expected:
            yield f"README.md: {begin} expected {expected} of the JSON, got {got}"
    yield from _wrong_sums(lines)


def unmeasured(text: str) -> list[str]:
    """Rows of README.md's tables that have figures and that nothing compares."""
    known = tuple(qsdp() | steps() | ddp() | dilocox())
    rows = [line for line in text.splitlines() if line.startswith("| ") and any(map(_is_measured, line.split("|")))]
    return [row for row in rows if not row.startswith(known)]


def wrong_in_page(name: str, text: str) -> Iterator[str]:
    """Blocks of a result's page with other gates than the JSON has, or figures that the JSON has not; `name` is the page's."""
    for result, block in result_pages.blocks(text):
        if result in NO_JSON:
            continue
        content = load(result)
        known = {(g["name"], f"{g['value']:.4f}", g["op"], f"{g['bound']:.4f}") for g in content["gates"]}
        if strange := set(_GATE.findall(block)) - known:
            yield f"{name}: {result}.json has other gates than {sorted(strange)[:3]}"
        rows = [line for line in block.splitlines() if line.startswith("  ")]
        lost = untraced(rows, sorted(set(_numbers(content))))
        if len(lost) > NOT_KEPT.get(result, 0):
            yield f"{name}: {result}.json has no such numbers among others: {lost[:10]}"


def untraced(rows: list[str], numbers: list[float]) -> list[str]:
    """Figures with a decimal point in rows that no number is, in any unit, when it is rounded as they are."""
    return [
        text
        for row in rows
        for text in re.findall(r"(?<![\w.,-])-?(\d+\.\d+)(?!\w)", row)
        if not _is_one_of(float(text), 0.501 * 10.0 ** -len(text.partition(".")[2]), numbers)
    ]


def _is_one_of(value: float, within: float, numbers: list[float]) -> bool:
    for unit in _UNITS:
        at = bisect.bisect_left(numbers, (value - within) * unit)
        if at < len(numbers) and numbers[at] <= (value + within) * unit:
            return True
    return False


def _numbers(content: Any) -> Iterator[float]:
    """All magnitudes in a JSON, and of a speed with a bound its share of it."""
    if isinstance(content, dict) and {"speedup", "bound"} <= content.keys():
        yield content["speedup"] / content["bound"]
    if isinstance(content, dict | list):
        for item in content.values() if isinstance(content, dict) else content:
            yield from _numbers(item)
    elif isinstance(content, int | float) and not isinstance(content, bool) and content == content:
        yield abs(float(content))


def _only_link(name: str) -> list[dict[str, Any]]:
    (link,) = load(name)["links"]
    rows: list[dict[str, Any]] = link["rows"]
    return rows


def _way(seconds: dict[str, float], rows: dict[str, dict[str, Any]], name: str) -> list[str]:
    return [short(seconds[name], 2), f"{rows[name]['speedup']:.1f}"]


def _is_measured(cell: str) -> bool:
    """Whether a table's cell has nothing but figures, units and what they are beside."""
    words = re.sub(r"[×+;,:]", " ", _FIGURE.sub(" # ", cell)).split()
    return "#" in words and set(words) <= {"#", "±", "ratio", "exact", "PowerSGD", "MB", "fewer", "faster"}


def _last_step(result: dict[str, Any], name: str) -> float:
    """Bytes a step of a run's second half: low ranks begin with steps of another kind."""
    sent = next(run["bytes"] for run in result["curves"] if run["name"] == name)
    half: float = (sent[-1] - sent[len(sent) // 2 - 1]) / (len(sent) - len(sent) // 2)
    return half


def _wrong_sums(lines: list[str]) -> Iterator[str]:
    curves = load("qsdp")["curves"]
    rows = [line.split("|") for line in lines if re.match(r"\| (weights|gradients) a rank sent ", line)]
    for place, name in ((2, "exact"), (3, "W8G8/1024")):
        said = sum(float(_FIGURE.findall(row[place])[0]) for row in rows)
        counted = next(curve["bytes"][-1] for curve in curves if curve["name"] == name) / 1e6
        if abs(said - counted) > 0.11:  # two roundings
            yield f"README.md: {name}: expected {counted:.1f} MB in all of the JSON, got {said:.1f}"


def main() -> int:
    """The exit status."""
    readme = (ROOT / "README.md").read_text()
    wrong = [*wrong_in_readme(readme)]
    for page in sorted(RESULTS.glob("*.md")):
        wrong += wrong_in_page(page.name, page.read_text())
    wrong += [f"README.md: expected a result for the figures of {row!r}, got none" for row in unmeasured(readme)]
    print("\n".join(wrong or ["all figures are the results'"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
