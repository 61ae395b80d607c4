"""`python benchmarks convergence fsdp_variants` and `fsdp_tables` at 2 ranks, the second on a text of one's own."""

import importlib
from pathlib import Path

import pytest
from example_main import quick_convergence

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_variants_quick(tmp_path):
    content = quick_convergence("fsdp_variants", 10, tmp_path)
    assert content["text"]["name"].startswith("Python ")


@pytest.mark.slow
def test_tables_quick(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("It is what it is, and it is not what it was. " * 200)
    content = quick_convergence("fsdp_tables", 5, tmp_path, "--data", text)
    assert content["text"]["name"] == "text" and content["text"]["bytes"] == 9000
    sizes, levels, bits, buckets, _ = content["tables"]
    assert [row[0] for row in sizes["rows"]] == ["1.6 M"]
    assert [row[0] for row in levels["rows"]] == ["exact", "W4G4"]
    assert [row[0] for row in bits["rows"]] == ["W4"]
    assert [row[0] for row in buckets["rows"]] == ["exact", "W8G8", "naive W8G8"]
    for table in content["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    learned, even = content["configurations"]["W4G4 learned"], content["configurations"]["W4G4 even"]
    assert even == learned | {"learn_at": []}


def test_levels_are_learned_at_the_papers_shares(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    levels = importlib.import_module("convergence.fsdp.levels")
    assert levels.learned_at(4800) == (400, 1900, 3800)
    assert levels.learned_at(240) == (20, 95, 190)
    presets = levels.presets({"steps": 240}, tuple(levels.PAIRS))
    assert presets["W4G32 learned"].gradients == "none" and presets["W5G4 even"].learn_at == ()


def test_a_ratio_is_of_paired_seeds(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    paired = importlib.import_module("convergence.paired")
    runs, exact = ([{"ranks": [{"perplexity": value}]} for value in values] for values in ((6.0, 3.0), (5.0, 3.0, 9.0)))
    ratio = paired.ratio(runs, exact)
    assert ratio.by_seed == (1.2, 1.0) and ratio.mean == pytest.approx(1.1) and ratio.error == pytest.approx(0.1)
    assert paired.ratio(runs[:1], exact).error == 0.0
    assert ratio.cell() == "1.1000 ± 0.1000"


def test_the_sweep_of_shares_is_told_beside_the_exact_step(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    fake, measure = importlib.import_module("convergence.fsdp.fake"), importlib.import_module("steps.measure")
    assert [case.fake for case in fake.CASES] == [0, *fake.RATIOS, 0, 0] and fake.CASES[0].base
    # Computing alone takes 1 s, the exact step 3 s; a half of the bytes takes half of the rest.
    sent = {"exact": 4_000_000, "γ = 2": 2_000_000}
    ways = [{"seconds": [1.0]}] + [
        {"seconds": [s], "sent": [n]} for s, n in zip((3.0, 2.0), sent.values(), strict=True)
    ]
    ranks = [[{"sent": [0], **way} for way in ways]] * 2
    alone, rows = measure.rows_of(fake.CASES[:2], "100mbit", ranks)
    assert fake.table_of("100mbit", alone, rows).rows == [
        ["no communication", "1.000", "3.00", "", ""],
        ["exact", "3.000", "1.00", "1.00", "4.000"],
        ["γ = 2", "2.000", "1.50", "1.50", "2.000"],
    ]


def test_the_grid_has_a_row_by_bits_of_weights_and_a_column_by_those_of_gradients(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    fake, measure = importlib.import_module("convergence.fsdp.fake"), importlib.import_module("steps.measure")
    ways = [{"sent": [0], "seconds": [1.0]}, *({"sent": [10], "seconds": [2.0 + i]} for i in range(9))]
    measured = measure.rows_of(fake.GRID, "100mbit", [ways, ways])
    monkeypatch.setattr(fake, "measure_steps", lambda *_, **__: measured)
    (table,) = fake.measure_grid(quick=True, seeds=1)[0]["tables"]
    assert table["columns"] == ["no communication: 1.000", "G32", "G8", "G4"]
    assert table["rows"][1] == ["W8", "5.000", "6.000", "7.000"]
    assert fake.GRID[5].weights == "minmax8:bucket=1024" and fake.GRID[5].gradients == "qsgd4:bucket=1024"
