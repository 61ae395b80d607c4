"""`python benchmarks convergence diloco` at 2 ranks, and CocktailSGD."""

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch
from example_main import quick_convergence

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "examples")]  # of a pool's ranks


@pytest.mark.slow
def test_convergence_quick(tmp_path):
    quick_convergence("diloco", 7, tmp_path)


@pytest.mark.slow
def test_adaptive_quick(tmp_path):
    """The gate of bytes holds the formula of what the measure adds."""
    content = quick_convergence("diloco_adaptive", 2, tmp_path)
    assert {curve["name"] for curve in content["curves"]} == {"r=24, H=20", "r and H, average", "r and H, 0.95"}


@pytest.mark.slow
def test_unequal_quick(tmp_path):
    content = quick_convergence("diloco_unequal", 2, tmp_path)
    by_clock = content["curves"][1]
    assert len(by_clock["slow_step"]) == len(by_clock["step"]) == 4, "both sites make the same outer steps"


@pytest.mark.slow
def test_residuals_quick(tmp_path):
    content = quick_convergence("diloco_residuals", 2, tmp_path)
    kept = {c["outer"]["residual_dtype"] for c in content["configurations"].values()}
    assert kept == {"float32", "int8"} and len(content["curves"]) == 4


def test_the_settings_of_table1_have_the_papers_ratios(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    table1 = importlib.import_module("convergence.diloco.table1")
    for name, row in table1.ROWS.items():
        assert table1.ratio_as_counted(row.configuration) == row.ratio, name
    assert table1.ROWS["OpenDiLoCo"].configuration.outer["sync_every"] == 500


def test_what_is_timed_on_links_is_what_ran(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    link, runs = importlib.import_module("convergence.diloco.link"), importlib.import_module("convergence.diloco.runs")
    full = {"configuration": runs.PRESETS["DiLoCoX"], "ratio": 186.2, "bytes": [2_301_000]}
    known = {**runs.PRESETS, **runs.equally_compressed(full)}
    timed = {name: link.timed(dataclasses.asdict(known[name])) for name in link.DRAWN}
    assert timed["all_reduce"] == timed["CocktailSGD"] == (3, 1, 10)
    assert timed["DiLoCoX"] == (60, 20, 5) and timed["OpenDiLoCo"] == (60, 200, 1), "whole intervals"
    even = [float(step) for step in range(1, 12)]
    late = [step + (50.0 if step > 8 else 0.0) for step in even]  # one interval of three is stalled
    assert link.seconds_of([even, late], 3, 2) == 1.0
    assert link.seconds_of([even, [2 * step for step in even]], 3, 2) == 2.0, "the slower host counts"


def test_every_row_of_table1_is_timed_as_a_long_run_is(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    throughput, table1 = (
        importlib.import_module("diloco.throughput"),
        importlib.import_module("convergence.diloco.table1"),
    )
    turns = {of: {turn.name: turn for turn in throughput.turns(of, quick=False)} for of in throughput.RATES}
    last = {f"{name}{throughput.AT_THE_END}" for name in ("Full DiLoCoX", "w/o Overlap")}
    assert set().union(*turns.values()) == {*table1.ROWS, throughput.ALONE, *last}
    assert all({name, other} <= set(turns[of]) for name, other, of in throughput.CLAIMS)
    full = turns["107B"]["Full DiLoCoX"]
    assert full.untimed == full.timed == 125, "its message has an interval to travel in before the clock starts"
    assert full.configuration.outer["mode"] == "continue" and "sync_warmup" not in full.configuration.outer
    end = turns["107B"][f"Full DiLoCoX{throughput.AT_THE_END}"]
    assert end.of == full.of == "Full DiLoCoX" and end.configuration.outer["rank"] < 24 and end.timed < 125
    assert turns["107B"]["w/o Overlap"].untimed == 0
    assert turns["107B"]["AllReduce"].paper == 10.4


def _cocktail(r, steps, stride, keep):
    r.init()
    weight = torch.nn.Parameter(torch.zeros(1500))
    cocktail = importlib.import_module("convergence.diloco.cocktail")
    optimizer = cocktail.CocktailSGD(torch.optim.SGD([weight], lr=1.0), stride=stride, keep=keep)
    draw = torch.Generator().manual_seed(r.rank)
    owed = torch.zeros(1500)
    for _ in range(steps):
        weight.grad = torch.randn(1500, generator=draw)
        owed += weight.grad
        optimizer.step()
    optimizer.finish()
    held = optimizer.error()
    return owed.double(), held.double(), weight.detach().double()


def test_cocktail_loses_nothing(pair):
    """Over ranks, what was to be applied is what was applied and what waits; the ranks' parameters are the same."""
    sides = pair(_cocktail, 12, 5, 0.1)
    owed, held = (sum(side[i] for side in sides) for i in (0, 1))
    applied = sides[0][2]
    assert torch.equal(applied, sides[1][2])
    assert applied.count_nonzero() < 0.9 * 1500
    torch.testing.assert_close(-2 * applied + held, owed, rtol=0, atol=1e-4)
