"""QSDP's own tables and figures (arXiv 2302.02390), part by part, next to what the paper has.

`sizes`: 8 bits by size of the model (Table 1). `levels`: learned against even levels (Table 3). `bits`: pairs of bits for
weights and gradients (Tables 1 and 2), and 8 bits without buckets. As root, `grid`: seconds of a step by bits of weights and of
gradients on a link (Table 5).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import paired
from linklab import LabUnavailable
from report import Gate
from result_pages import RESULTS
from steps import measure as steps
from steps.cases import Case
from tables import Table, to_json

from convergence.fsdp import runs as fsdp_runs
from convergence.fsdp.rank import Configuration
from convergence.fsdp.runs import Runs, perplexity
from convergence.fsdp.variants import coded
from torch_lowcomm.fsdp.levels import PAPERS_STEPS

STEPS = 200
# GPT-125M on C4: perplexity of the baseline, and by bits of weights and gradients with even and with learned levels.
PAPERS_BASELINE = 35.81
PAPER = {(6, 4): (35.81, 35.75), (5, 4): (36.34, 36.01), (4, 4): (37.61, 36.94), (4, 32): (37.11, 36.55)}
PAPERS_RUN = 4800  # steps
MODELS = {"1.6 M": {"width": 256, "layers": 2}, "10.7 M": {"width": 384, "layers": 6, "heads": 6}}
WEIGHTS, GRADIENTS = (8, 6, 5, 4, 3), (32, 8, 4)
# One scale for all of a layer's flat buffer, norms in it: the paper leaves it out because it loses over 2 units of perplexity.
NAIVE = "naive W8G8"
RATE, GRID = "100mbit", (32, 8, 4)
LEARNED = ((6, 4), (5, 4), (4, 4), (4, 32), (3, 3))


def step_seconds(_content: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{link: {run: seconds a step}} of the runs of 10.7 million parameters, as `steps fsdp` has recorded that model's."""
    (link,) = json.loads((RESULTS / "steps_fsdp.json").read_text())["links"]
    seconds = {row["name"]: row["seconds"] for row in link["rows"]}
    return {link["rate"]: {f"{way}, 10.7 M": seconds[f"lowcomm {way}"] for way in ("exact", "W8G8")}}


def compared(_content: dict[str, Any], _times: dict[str, dict[str, float]]) -> list[Any]:
    """Nothing: the picture says it."""
    return []


def ratio(runs: Runs, name: str, baseline: str = "exact") -> paired.Ratio:
    """Of perplexities."""
    return paired.ratio(perplexity, runs[name], runs[baseline])


def mean(runs: Runs, name: str) -> float:
    """Perplexity, over seeds."""
    return sum(map(perplexity, runs[name])) / len(runs[name])


def papers(bits: tuple[int, int], way: int) -> str:
    """The paper's perplexity with even (0) or learned (1) levels, and that over its baseline's; "" where it has none."""
    return f"{PAPER[bits][way]} ({PAPER[bits][way] / PAPERS_BASELINE:.4f})" if bits in PAPER else ""


def learned_at(steps: int) -> tuple[int, ...]:
    """The paper's steps at which levels are learned, as shares of a run of so many."""
    return tuple(round(at * steps / PAPERS_RUN) for at in PAPERS_STEPS)


def sizes(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """8 bits and exact at every size; `quick`: the smaller one for a few steps, and a loose bound."""
    size = fsdp_runs.QUICK if quick else {"steps": STEPS}
    names = list(MODELS)[: 1 if quick else None]
    runs = fsdp_runs.run_all(
        {
            f"{way}, {name}": dataclasses.replace(c, **size, **MODELS[name])
            for name in names
            for way, c in (("exact", Configuration()), ("W8G8", coded(8, 8)))
        },
        seeds,
    )
    rows, gates = [], []
    for name in names:
        ways = [f"{way}, {name}" for way in ("exact", "W8G8")]
        found = ratio(runs, ways[1], ways[0])
        sent = [f"{fsdp_runs.curve(runs[way][0])['bytes'][-1] / 1e6:.0f}" for way in ways]
        rows.append([name, *(f"{mean(runs, way):.4f}" for way in ways), found.cell(), *sent])
        gates.append(found.gate(f"perplexity ratio W8G8 / exact, {name}", "<=", 1.1 if quick else 1.01))
    columns = ["parameters", "exact", "W8G8", "W8G8 / exact", "MB a rank sent, exact", "W8G8"]
    return finished(runs, [Table("perplexity with 8 bits by size (the paper's Table 1)", columns, rows)], gates)


def bits(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """All pairs of bits, and 8 bits without buckets; `quick`: W4G4 and 8 bits for a few steps, and a loose bound."""
    size = fsdp_runs.QUICK if quick else {"steps": STEPS}
    weights, gradients = ((4,), (4,)) if quick else (WEIGHTS, GRADIENTS)
    presets = {"exact": Configuration()} | {f"W{w}G{g}": coded(w, g) for w in weights for g in gradients}
    presets["W8G8"] = coded(8, 8)
    presets[NAIVE] = Configuration(policy="all_gather=minmax8:bucket=tensor; reduce_scatter=qsgd8:bucket=tensor")
    runs = fsdp_runs.run_all({name: dataclasses.replace(c, **size) for name, c in presets.items()}, seeds)
    rows = [
        [
            f"W{w}",
            *(ratio(runs, f"W{w}G{g}").cell() for g in gradients),
            *(papers((w, g), 0) for g in (32, 4)),
        ]
        for w in weights
    ]
    columns = ["perplexity / exact", *(f"G{g}" for g in gradients), "paper: G32 (/ baseline)", "paper: G4 (/ baseline)"]
    title = "perplexity by bits of weights and gradients, by the exact run's (the paper's Table 2)"
    of_buckets = [
        [
            name,
            f"{mean(runs, name):.3f}",
            "" if name == "exact" else ratio(runs, name).cell(),
            f"{fsdp_runs.curve(runs[name][0])['bytes'][-1] / 1e6:.1f}",
        ]
        for name in ("exact", "W8G8", NAIVE)
    ]
    buckets = Table(
        "8 bits with buckets of 1024, and with one scale a flat buffer",
        ["run", "perplexity", "/ exact", "MB a rank sent"],
        of_buckets,
    )
    name = f"perplexity ratio {NAIVE} / W8G8"
    found = ratio(runs, NAIVE, "W8G8").show(name)
    gate = Gate(f"{name}, bound 1 + a standard error", found.mean, ">", 1 + found.error)
    if quick:
        gate = Gate("perplexity ratio W8G8 / exact, loose", ratio(runs, "W8G8").mean, "<=", 1.1)
    return finished(runs, [Table(title, columns, rows), buckets], [gate])


def levels(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Pairs of bits with learned and with even levels, in a model whose matrices learn; `quick`: W4G4 for a few steps."""
    size = (fsdp_runs.QUICK if quick else {"steps": STEPS}) | MODELS[
        "1.6 M"
    ]  # over 100,000 elements a matrix, which learn
    pairs = ((4, 4),) if quick else LEARNED
    presets = {"exact": Configuration(**size)}
    for w, g in pairs:
        specs = ["none" if b == 32 else f"levels{b}:bucket=1024" for b in (w, g)]
        for way, at in (("even", ()), ("learned", learned_at(size["steps"]))):
            presets[f"W{w}G{g} {way}"] = Configuration(weights=specs[0], gradients=specs[1], learn_at=at, **size)
    runs = fsdp_runs.run_all(presets, seeds)
    rows, gates = [["exact", f"{mean(runs, 'exact'):.3f}", "", "", "", "", f"{PAPERS_BASELINE}", "", ""]], []
    for pair in pairs:
        name = "W{}G{}".format(*pair)
        ways = [f"{name} even", f"{name} learned"]
        found = ratio(runs, ways[1], ways[0]).show(f"perplexity ratio {name} learned / even")
        row = [name]
        for way in ways:
            row += [f"{mean(runs, way):.3f}", ratio(runs, way).cell()]
        theirs = f"{PAPER[pair][1] / PAPER[pair][0]:.4f}" if pair in PAPER else ""
        rows.append([*row, found.cell(), papers(pair, 0), papers(pair, 1), theirs])
        if pair in ((4, 4), (4, 32)):
            gates.append(found.gate(f"perplexity ratio {name} learned / even levels", "<=", 1.1 if quick else 1))
    columns = ["bits", "even levels", "/ exact", "learned", "/ exact", "learned / even"]
    columns += ["paper: even (/ baseline)", "paper: learned (/ baseline)", "paper: learned / even"]
    table = Table("perplexity with even and with learned levels (the paper's Table 3)", columns, rows)
    return finished(runs, [table], gates)


def grid(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Steps of all pairs of bits on two hosts of a lab, timed in turn; a sentence where there is none. `quick`: a small model."""
    model, repetitions = ("base", 1) if quick else ("10M", 9)
    cases = []
    for w in GRID:
        for g in GRID:
            weights = "none" if w == 32 else f"minmax{w}:bucket=1024"
            gradients = "none" if g == 32 else f"qsgd{g}:bucket=1024"
            cases.append(Case(f"W{w}G{g}", weights=weights, gradients=gradients, base=w == g == 32))
    try:
        alone, rows = steps.measure("fsdp", cases, rate=RATE, model=model, batch=8, repetitions=repetitions)
    except LabUnavailable as error:
        print(f"# no part grid: {error}")
        return {"tables": [], "links": []}, []
    seconds = {row.name: row.seconds for row in rows}
    title = f"seconds a step at {RATE} by bits of weights and of gradients (the paper's Table 5, at 100 Gbit/s)"
    cells = [[f"W{w}", *(f"{seconds[f'W{w}G{g}']:.3f}" for g in GRID)] for w in GRID]
    table = Table(title, [f"no communication: {alone:.3f}", *(f"G{g}" for g in GRID)], cells)
    print(table.text(), flush=True)
    link = {"rate": RATE, "model": model, "comp_s": alone, "rows": [dataclasses.asdict(row) for row in rows]}
    return {"tables": to_json([table]), "links": [link]}, []


def finished(runs: Runs, tables: list[Table], gates: list[Gate]) -> tuple[dict[str, Any], list[Gate]]:
    """Prints a part's tables; its content of the JSON, and its gates."""
    print("\n".join(table.text() for table in tables))
    return {"tables": to_json(tables), **fsdp_runs.to_json(runs)}, gates


PARTS = {
    "sizes": sizes,
    "levels": levels,
    "bits": bits,
    "grid": grid,
}


def measure(*, quick: bool, seeds: int, only: str = "") -> tuple[dict[str, Any], list[Gate]]:
    """Runs all parts, or `only` one of PARTS; prints a row a run and a table a part.

    `quick`: a few runs of a few steps, without `grid`, and bounds that are loose. `grid` has no seeds.
    """
    content: dict[str, Any] = {"tables": [], "configurations": {}, "curves": []}
    gates: list[Gate] = []
    for part, measure_part in PARTS.items():
        if only not in ("", part) or (quick and part == "grid" and not only):
            continue
        found, passed = measure_part(quick=quick, seeds=seeds)
        for key, value in found.items():
            content[key] = content[key] | value if key == "configurations" else content.get(key, []) + value
        gates += passed
    return content, gates
