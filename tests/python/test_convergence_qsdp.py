"""`benchmarks/convergence.py qsdp_variants` at 2 ranks."""

import importlib
from pathlib import Path

import pytest
from example_main import quick_convergence

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_variants_quick(tmp_path):
    content = quick_convergence("qsdp_variants", 10, tmp_path)
    assert content["text"]["name"].startswith("Python ")


def test_a_ratio_is_of_paired_seeds(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    paired = importlib.import_module("paired")
    runs, exact = ([{"ranks": [{"perplexity": value}]} for value in values] for values in ((6.0, 3.0), (5.0, 3.0, 9.0)))
    ratio = paired.ratio(runs, exact)
    assert ratio.by_seed == (1.2, 1.0) and ratio.mean == pytest.approx(1.1) and ratio.error == pytest.approx(0.1)
    assert paired.ratio(runs[:1], exact).error == 0.0
    assert ratio.cell() == "1.1000 ± 0.1000"
