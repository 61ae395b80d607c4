"""Judges `lc.plan`: predicts this library's rows of other results from their compute and link, next to what was measured.

    python benchmarks planned [--json FILE]

benchmarks/results/planned.md has the definitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import figures
import model
import report
from steps.cases import CASES, MODELS
from tables import Columns

from torch_lowcomm.planner import Link, Training, training
from torch_lowcomm.planner.measure import CODECS, codings

WITHIN = 0.10
COLUMNS = Columns("family 16 | case 44 | link 34 | measured s 12.4f | planned s 12.4f | planned / measured 20.3f")


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured row and its prediction, seconds a step."""

    family: str
    case: str
    link: str
    measured_s: float
    planned_s: float

    @property
    def ratio(self) -> float:
        """Planned / measured."""
        return self.planned_s / self.measured_s

    @property
    def holds(self) -> bool:
        """Whether the prediction is within 10 % of the measurement."""
        return abs(self.ratio - 1) <= WITHIN


def of_model(name: str, step_s: float) -> Training:
    """The byte-level GPT of a name, with a step that takes so long."""
    config = MODELS[name]
    gpt = model.GPT(model.Config(**config))
    shapes = [tuple(p.shape) for p in gpt.parameters()]
    return Training(
        parameters=sum(p.numel() for p in gpt.parameters()),
        forward_s=step_s / 3,
        backward_s=2 * step_s / 3,
        layers=config["layers"],
        matrices=[(shape[0], shape[1]) for shape in shapes if len(shape) > 1],
        codings=codings(codecs=sorted({*CODECS, *(case.codec for case in CASES["ddp"] if case.codec)})),
    )


def of_steps(method: str, suffix: str) -> Iterator[Row]:
    """The rows of lowcomm in a result of `steps`."""
    content: dict[str, Any] = figures.load(f"steps_{method}{suffix}")
    cases = {case.name: case for case in CASES[method]}
    for found in content["links"]:
        of = of_model(content["model"], found["comp_s"])
        link = Link.of(found["rate"], 2)
        for row in found["rows"]:
            case = cases.get(row["name"])
            if case is None or row["peer"]:
                continue
            if method == "fsdp":
                weights, gradients = (None if text == "none" else text for text in (case.weights, case.gradients))
                seconds, _ = training.fsdp_s(of, link, weights, gradients)
            else:
                factors = of.factor_elements(case.rank) if case.rank else None
                seconds, _ = training.ddp_s(of, link, case.codec or None, factors=factors)
            yield Row(f"steps {method}", row["name"], row["rate"], row["seconds"], seconds)


def of_diloco() -> Iterator[Row]:
    """The rows of lowcomm in `diloco_lab`."""
    content = figures.load("diloco_lab")
    for found in content["links"]:
        link = Link.of(found["rate"], found["sites"])
        for row in found["rows"]:
            mode, _, rest = row["name"].partition(" ")
            if mode not in ("sync", "continue", "streaming"):
                continue
            of = of_model(content["setting"]["model"], row["step_s"])
            codec = {"fp32": None, "gauss2": "gauss2"}.get(rest, "sym4:bucket=128")
            seconds, _ = training.outer_s(
                of,
                link,
                codec,
                content["setting"]["every"],
                "restart" if mode == "streaming" else mode,
                factors=of.factor_elements(64) if "rank" in rest else None,
                fragments=2 if mode == "streaming" else 1,
            )
            where = f"{found['sites']} sites, {found['rate']}"
            yield Row("diloco_lab", row["name"], where, row["step_s"] / row["share"], seconds)


def of_pipelines() -> Iterator[Row]:
    """The rows of lowcomm in `pipelines` and `subspace_links`, whose schedules were simulated when they were measured."""
    links = [("pipelines", found) for found in figures.load("pipelines")["links"]]
    for setting in figures.load("subspace_links")["settings"]:
        links += [("subspace_links", {**setting[way], "stages": setting["name"]}) for way in ("unlimited", "slow")]
    for family, found in links:
        for row in found["rows"]:
            if row["ours"] and row.get("bound_s"):
                where = f"{found['link']}, {found['stages']}" if "stages" in found else found["link"]
                yield Row(family, f"{row['name']}, {row['order']}", where, row["seconds"], row["bound_s"])


def main() -> int:
    """Prints all rows, and a gate a family: how many of its rows are off by more than 10 %."""
    args = report.arguments(__doc__).parse_args()
    print(report.heading("planned", within=WITHIN))
    print(COLUMNS.heading())
    rows: list[Row] = []
    for method in ("ddp", "fsdp"):
        for suffix in ("_10mbit", "", "_1gbit"):
            rows += of_steps(method, suffix)
    rows += [*of_diloco(), *of_pipelines()]
    for row in rows:
        print(COLUMNS.row(row.family, row.case, row.link, row.measured_s, row.planned_s, row.ratio))
    gates = []
    for family in dict.fromkeys(row.family for row in rows):
        own = [row for row in rows if row.family == family]
        off = sum(not row.holds for row in own)
        gates.append(report.Gate(f"{family}: rows of {len(own)} that are off by more than 10 %", off, "==", 0))
    return report.finish(gates, args.json, {"rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows]})
