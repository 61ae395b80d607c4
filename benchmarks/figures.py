"""Finds figures of pages in results: those of README.md's table, and of the blocks on the pages under results/.

A row of README.md's table is found by how it begins, and all of its figures are compared. A block of a result's page
(`result_pages.py`) names its JSON and has the same gates: names, values, bounds. Each figure of its rows is a number of that
JSON in some unit, at the precision with which it is printed; a mistyped figure, or one of an earlier run, hardly ever is.
`python benchmarks pages` runs these checks.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import result_pages

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_CONTEXT = 64  # tokens a sequence of the benchmarks' GPT
_MICRO_BATCHES = 8  # of a step of `pipelines`
_GATE = re.compile(r"^(?:PASS|FAIL)  (.+?) +(\S+) +(<=|>=|<|>|==) (\S+)$", re.MULTILINE)
_UNITS = (1, 1e-9, 1e-6, 1e-3, 1e-2, 1e3, 1e6, 1e9)


def load(name: str) -> dict[str, Any]:
    """A result by name."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def table() -> dict[str, list[str]]:
    """README.md's tables, by how each row begins: seconds a step, times as fast as gloo, MB a step, perplexity / exact's."""
    fsdp, ddp = ({row["name"]: row for row in _only_link(f"steps_{method}")["rows"]} for method in ("fsdp", "ddp"))
    diloco = _step_of_outer("sync gauss2")

    def row(step: dict[str, Any], base: dict[str, Any], perplexity: str) -> list[str]:
        times = base["seconds"] / step["seconds"]
        return [f"{step['seconds']:.2f}", f"{times:.1f}", f"{step['sent'] / 1e6:.2f}", perplexity]

    eight_bits = _ratio("fsdp_sizes", "W8G8, 10.7 M", "exact, 10.7 M")
    return {
        "| FSDP2 on gloo, float32 |": row(fsdp["gloo fp32"], fsdp["gloo fp32"], "1"),
        "| FSDP2 on lowcomm, exact |": row(fsdp["lowcomm exact"], fsdp["gloo fp32"], "1"),
        "| FSDP2 with 8 bits |": row(fsdp["lowcomm W8G8"], fsdp["gloo fp32"], eight_bits),
        "| DDP on gloo, float32 |": row(ddp["gloo fp32"], ddp["gloo fp32"], "1"),
        "| DDP on gloo, PowerSGD of rank 4 (torch's hook) |": row(
            ddp["gloo, torch's PowerSGD rank 4"], ddp["gloo fp32"], _ratio("ddp", "PowerSGD rank 4")
        ),
        "| DDP with 4 bits and error feedback |": row(ddp["lowcomm sym4"], ddp["gloo fp32"], _ratio("ddp", "sym4")),
        "| DDP with factors of rank 4 in 8 bits |": row(
            ddp["lowcomm rank 4, sym8"], ddp["gloo fp32"], _ratio("ddp", "rank 4, sym8")
        ),
        "| DiLoCo every 20 steps, 2 bits |": row(diloco, ddp["gloo fp32"], _ratio_of_losses("DiLoCo, gauss2")),
        **_stages(),
    }


def _stages() -> dict[str, list[str]]:
    """The table of pipelines: seconds on two links, times as fast as torch's 1F1B, MB of both hosts, perplexity / exact's."""
    fast, slow = (
        {(row["name"], row["order"]): row for row in _pipelines(f"{rate} 25ms")} for rate in ("100mbit", "10mbit")
    )
    rival = fast["torch, gloo", "1F1B"]["seconds"]

    def row(name: str, order: str, run: str) -> list[str]:
        step, there = fast[name, order], slow.get((name, order))
        sent = _MICRO_BATCHES * (step["activation"] + step["gradient"])
        seconds = [f"{one['seconds']:.2f}" if one else "-" for one in (step, there)]
        return [*seconds, f"{rival / step['seconds']:.1f}", f"{sent / 1e6:.2f}", _validation_of_stages(run)]

    return {
        "| torch's stages on gloo, GPipe |": row("torch, gloo", "GPipe", "exact"),
        "| torch's stages on gloo, 1F1B |": row("torch, gloo", "1F1B", "exact"),
        "| `lc.pipeline.Stage`, exact |": row("exact", "GPipe", "exact"),
        "| `lc.pipeline.Stage`, 4 bits |": row("gauss4, gauss4", "GPipe", "DirectQ gauss4/gauss4"),
        "| `lc.pipeline.Stage`, changes in 2 bits |": row("changes gauss2, gauss4", "GPipe", "AQ gauss2/gauss4"),
    }


def gate(of_json: dict[str, Any]) -> tuple[str, str, str, str]:
    """A result's gate as its line prints it: name, value, operator, bound."""
    return of_json["name"], f"{of_json['value']:.4f}", of_json["op"], f"{of_json['bound']:.4f}"


def gates_in(text: str) -> set[tuple[str, str, str, str]]:
    """The same of the lines that begin with PASS or FAIL."""
    return set(_GATE.findall(text))


def wrong_in_readme(text: str) -> Iterator[str]:
    """Rows of README.md's table that are not what results say."""
    for begin, expected in table().items():
        found = [line for line in text.splitlines() if line.startswith(begin)]
        if len(found) != 1:
            yield f"README.md: expected one row that begins with {begin!r}, got {len(found)}"
        elif (got := _cells(found[0])) != expected:
            yield f"README.md: {begin} expected {expected} of the JSON, got {got}"


def unmeasured(text: str) -> list[str]:
    """Rows of README.md's tables that have figures and that nothing compares."""
    rows = [line for line in text.splitlines() if line.startswith("| ") and any(map(_is_figure, _cells(line)))]
    return [row for row in rows if not row.startswith(tuple(table()))]


def wrong_in_page(name: str, text: str) -> Iterator[str]:
    """Blocks of a result's page with other gates than the JSON has, or figures that the JSON has not; `name` is the page's."""
    for result, block in result_pages.blocks(text):
        content = load(result)
        if strange := gates_in(block) - {gate(of_json) for of_json in content["gates"]}:
            yield f"{name}: {result}.json has other gates than {sorted(strange)[:3]}"
        curves = content.get("curves", [])
        names = {curve["name"] for curve in curves if isinstance(curve, dict)}  # they may have figures of their own
        rows = [line for line in block.splitlines() if line.startswith("  ")]
        rows = [line.replace(next((name for name in names if name in line), "\n"), "") for line in rows]
        lost = untraced(rows, sorted(set(numbers_in(content))))
        if lost:
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


def numbers_in(content: Any) -> Iterator[float]:
    """All magnitudes in a JSON, and what rows compute of them when they are printed."""
    if isinstance(content, dict):
        yield from _computed(content)
    if isinstance(content, dict | list):
        for item in content.values() if isinstance(content, dict) else content:
            yield from numbers_in(item)
    elif isinstance(content, int | float) and not isinstance(content, bool) and content == content:
        yield abs(float(content))


def _computed(row: dict[str, Any]) -> Iterator[float]:
    """A speed's share of its bound; a tensor's MiB of float32; an outer step's own work by an inner step."""
    if isinstance(row.get("elements"), int):
        yield row["elements"] / 2**18
    if {"speedup", "bound"} <= row.keys():
        yield row["speedup"] / row["bound"]
    if {"local_s", "coding_s", "step_s"} <= row.keys():
        yield (row["local_s"] + row["coding_s"]) / row["step_s"]


def _only_link(name: str) -> dict[str, Any]:
    (link,) = load(name)["links"]
    return dict(link)


def _step_of_outer(name: str) -> dict[str, float]:
    """Of a case of the outer loop: seconds a step, and bytes that a host sent, a step."""
    result, link = load("diloco_speed"), _only_link("diloco_speed")
    setting = result.get("setting", result)  # where the program that is there has it
    row = next(row for row in link["rows"] if row["name"] == name)
    tokens = 2 * setting["batch"] * _CONTEXT  # of both ranks
    return {"seconds": tokens / row["speed"], "sent": row["sent"] / setting["every"]}


def _ratio(result: str, name: str, baseline: str = "exact") -> str:
    """Mean perplexity of a run / that of the exact one, over all seeds."""
    runs = load(result)["curves"]
    ours, exact = (
        statistics.mean(run["perplexity"] for run in runs if run["name"] == of and run["step"][-1] > 50)
        for of in (name, baseline)
    )
    return f"{ours / exact:.3f}"


def _ratio_of_losses(name: str) -> str:
    """The same of seed 0 of `convergence diloco`, whose runs have losses in nats."""
    runs = {run["name"]: run for run in load("diloco")["curves"] if run["seed"] == 0}
    return f"{math.exp(runs[name]['validation'] - runs['all_reduce']['validation']):.3f}"


def _validation_of_stages(name: str) -> str:
    """The same in two stages, of samples that come back: validation by exact messages after each run's best epoch, all seeds."""
    setting = "fine-tuning, 2 stages"
    runs = {(run["name"], run["seed"]): min(run["validations"]) for run in load("aq_fine_tuning")["curves"]}
    losses = {seed: loss for (run, seed), loss in runs.items() if run == f"{name}, {setting}"}
    return f"{math.exp(statistics.mean(loss - runs[f'exact, {setting}', seed] for seed, loss in losses.items())):.3f}"


def _pipelines(link: str) -> list[dict[str, Any]]:
    """Steps of `pipelines` on a link; the slow messages have the same link and another shape, and come later."""
    rows: list[dict[str, Any]] = next(of["rows"] for of in load("pipelines")["links"] if of["link"] == link)
    return rows


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")[2:-1]]


def _is_figure(cell: str) -> bool:
    return re.fullmatch(r"[\d.,]+ ?[×%]?", cell) is not None
