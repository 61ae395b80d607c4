"""`python benchmarks seed_replay_smollm2` with the examples' small network in the language model's place."""

import sys

import pytest
from links import ROOT

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from seed_replay import smollm2  # noqa: E402
from seed_replay.smollm2_rank import Configuration  # noqa: E402


@pytest.fixture
def data(tmp_path):
    lines = [f"{word}\t{text} {i}" for i in range(60) for word, text in (("good", "a fine film"), ("bad", "BORING"))]
    (tmp_path / "data").write_text("\n".join(lines))
    return str(tmp_path / "data")


@pytest.mark.slow
def test_both_ways_learn_with_equal_weights_on_both_ranks(data):
    runs = {
        way: [smollm2.run(way, Configuration(way, lr, model=None, data=data, steps=60, validation=20))]
        for way, lr in (("seed replay", 0.05), ("back-propagation", 0.01))
    }
    for way, (run,) in runs.items():
        assert run["loss"][-1] < 0.9 * run["loss"][0], way
    # A gradient of 4,194 numbers in float32, and a byte with its frame.
    a_step = {way: run["sent_bytes"] / 59 for way, (run,) in runs.items()}
    assert a_step["back-propagation"] > 4 * 4194 > 100 * 4 > a_step["seed replay"]
    assert {gate.name for gate in smollm2.gates(runs)} == {
        "seed replay: accuracy after, least",
        "back-propagation: accuracy after, least",
        "seed replay: bytes that a rank sends a step",
    }


def test_a_file_that_is_not_there_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["seed_replay_smollm2", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="which does not exist"):
        smollm2.main()
