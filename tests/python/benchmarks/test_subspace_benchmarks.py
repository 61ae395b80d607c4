"""The programs about subspaces: steps to a target, scores and held bytes worked out by hand, and quick forms of the programs."""

import json
import os
import subprocess
import sys

import pytest
import torch
from links import BENCHMARKS, ENV, ROOT, expect_labs

sys.path.insert(0, str(ROOT / "examples"))

from subspace import held, stable_rank, target_steps, wan

import torch_lowcomm as lc


def curve(name, *loss, seed=0):
    steps = [20 * (i + 1) for i in range(len(loss))]
    return {"name": name, "seed": seed, "step": steps, "loss": list(loss), "validation": loss[-1]}


def test_a_curve_that_falls_keeps_the_mean_of_neighbours_that_rise():
    assert target_steps.falling([5, 4, 3]) == [5, 4, 3]
    assert target_steps.falling([5, 3, 4, 2]) == [5, 3.5, 3.5, 2]
    assert target_steps.falling([1, 2, 3]) == [2, 2, 2]


def test_steps_to_a_target():
    steps, loss = [20, 40, 60], [4.0, 3.0, 2.0]
    assert target_steps.steps_to(steps, loss, 3.0) == 40
    assert target_steps.steps_to(steps, loss, 2.5) == 50
    assert target_steps.steps_to(steps, loss, 9.0) == 20
    assert target_steps.steps_to(steps, loss, 1.9) is None


def test_steps_are_means_of_paired_seeds_and_never_where_one_seed_is():
    curves = [curve("free", 5, 4, 3, 2, 1), curve("free", 6, 5, 4, 3, 2, seed=1)]
    curves += [curve("slow", 5, 4.5, 4, 3.5, 3), curve("slow", 6, 5, 4, 3, 2, seed=1), curve("bad", 5, 5, 5, 5, 4)]
    found = target_steps.of_runs(curves, 0.6, ("free", "slow", "bad", "missing"))
    assert found == {"free": 60, "slow": (100 + 60) / 2, "bad": None}
    assert target_steps.of_runs(curves, 0.8, ("slow",)) == {"slow": None}
    leaking = curve("leaking", 4, 3, 2, 1, 0.5) | {"validation": 2.0}
    assert target_steps.of_runs([*curves, leaking], 0.6, ("leaking",)) == {"leaking": None}, "its loss is not its own"


def stages(middle=1e-6, last=2e-6):
    one = wan.StageSeconds((middle, last), (2 * middle, 2 * last))
    return {"whole": one, "constrained": one}


def test_bytes_of_methods():
    found = {method.name: method.token_bytes() for method in wan.METHODS}
    assert found[wan.BF16] == 2048
    assert (found["constrained, d/8 in fp32"], found["constrained, d/8 in bf16"]) == (512, 256)
    assert found["constrained, d/8 in 8 bits"] == 128 + 8, "a bucket a token, its least value and its step"
    assert found["4 bits of all"] == 512 + 4 * 8


def test_a_step_is_that_of_its_slowest_part():
    micro_batch = wan.TOKENS / wan.MICRO_BATCHES
    # Without messages: the last stage computes all the time, once the first micro-batch has come to it.
    fast = wan.step_s(0, stages()["whole"], delay=0)
    assert fast == pytest.approx(micro_batch * (wan.MICRO_BATCHES * 6e-6 + (wan.STAGES - 1) * 3e-6), rel=1e-6)
    # Messages alone: a direction of a link is busy with all of a step's activations at least.
    messages = wan.step_s(2048, stages(0, 0)["whole"], delay=0)
    assert messages >= wan.TOKENS * 2048 * 8 / wan.RATE
    assert wan.step_s(2048, stages(0, 0)["whole"], rate=2 * wan.RATE, delay=0) == pytest.approx(messages / 2)
    # The mean of 1 / N(1, .2) is 1.045; links wait for each other's slowest messages on top of that.
    assert 1.04 < wan.step_s(2048, stages(0, 0)["whole"], delay=0, varying=True) / messages < 1.2


def test_the_records_machines_take_the_records_seconds():
    factor = wan.factor_of_record(stages())
    faster = {kind: one.faster(factor) for kind, one in stages().items()}
    uncompressed, coded = wan.RECORDS
    assert wan.step_s(coded.token_bytes / 2, faster["constrained"]) == pytest.approx(coded.seconds, rel=1e-3)
    assert wan.step_s(uncompressed.token_bytes / 2, faster["whole"]) == pytest.approx(uncompressed.seconds, rel=0.05)
    ratio = wan.records_ratio(faster, rate=wan.RATE, delay=wan.DELAY)
    assert ratio == pytest.approx(9125 * 19.9 / (2925 * 100.5), rel=0.05)


def test_scores_and_their_winner():
    seconds = {kind: one.faster(100) for kind, one in stages().items()}
    steps = {"free": 300.0, "constrained, 32": 600.0, "2 bits of all": None}
    found = wan.scores(steps, seconds, rate=20e6, delay=0.0)
    assert [score.name for score in found] == [wan.BF16, "2 bits of all", "constrained, d/8 in fp32"]
    by_name = {score.name: score for score in found}
    assert by_name["2 bits of all"].total_s is None, "it is not extrapolated"
    assert wan.winner(found).name == "constrained, d/8 in fp32", "four times fewer bytes, twice the steps"
    assert by_name[wan.BF16].total_s == 300 * by_name[wan.BF16].seconds
    slow = wan.scores(steps, {kind: one.faster(1e-3) for kind, one in stages().items()}, rate=1e9, delay=0.0)
    assert wan.winner(slow).name == wan.BF16, "where stages compute all the time bytes cost nothing"
    with pytest.raises(ValueError, match="got none"):
        wan.winner(wan.scores({"2 bits of all": None}, seconds, rate=20e6, delay=0.0))


def test_held_bytes_see_what_grows():
    """Boundaries of other kinds grow, and are seen to: a table with the vocabulary, activations with the context."""
    exact = [held.held(1, context, vocabulary) for context, vocabulary in ((32, 64), (128, 64), (32, 1024))]
    assert exact == [(held.expected(1, turning=False), 0)] * 3
    tables = [held.held(1, 32, vocabulary, boundary=lc.subspace.Projection(8))[0] for vocabulary in (64, 1024)]
    assert tables[1] - tables[0] == 2 * 960 * held.WIDTH * 4, "the sender's table and the receiver's"
    kept = [held.held(1, context, 64, boundary=lc.subspace.Bottleneck(8))[1] for context in (32, 128)]
    assert kept[0] < kept[1]


def test_the_energy_that_layers_have_in_the_same_dimensions():
    one, other = torch.zeros(8, 3), torch.zeros(8, 5)
    one[0, 0], other[1, 2] = 3.0, 0.1
    assert stable_rank.common_share([one, 2 * one], 1) == pytest.approx(1), "they share it"
    assert stable_rank.common_share([one, other], 1) == pytest.approx(0.5), "each has its own, and counts alike"
    assert stable_rank.common_share([torch.eye(8)], 2) == pytest.approx(0.25)


def test_channels_that_outweigh_all_others_are_found(capsys):
    stream = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    stream[7] = 80.0
    (row,) = stable_rank.outliers([stream])
    assert row["largest"][0] > 0.98
    assert row["gauss4"][1] < 0.25 < row["gauss2"][1] < 1, "rotated by itself"
    assert "largest channel" in capsys.readouterr().out


def run(tmp_path, *words):
    path = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS, *words, "--quick", "--json", path],
        env={**os.environ, **ENV, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


@pytest.mark.slow
def test_the_quick_scores(tmp_path):
    runs = ("free", "constrained, 32", "1 bit of all")
    curves = [curve(name, *(6 - i + 0.3 * number for i in range(5))) for number, name in enumerate(runs)]
    file = tmp_path / "curves.json"
    file.write_text(json.dumps({"curves": curves}))
    content, printed = run(tmp_path, "nanogpt_wan", "--only", "scores", "--curves", file)
    both = 2 * [wan.BF16] + 2 * ["constrained, d/8 in fp32"]
    assert [row["name"] for row in content["scores"]] == 2 * both, "two speeds, a row at each target"
    assert len(content["winners"]) == 2 * 2 * len(wan.RATES) * len(wan.DELAYS)
    assert content["winners"][0]["winner"] in printed


@pytest.mark.slow
def test_the_quick_links(tmp_path):
    """Rows of every case, on a link whose rate follows from what was computed; how fast they are is the benchmark's to judge."""
    expect_labs()
    content, _ = run(tmp_path, "subspace_links")
    (setting,) = content["settings"]
    unlimited, slow = setting["unlimited"], setting["slow"]
    names = ["uncompressed", "k = 10", "k = 64"]
    assert [row["name"] for row in slow["rows"]] == [row["name"] for row in unlimited["rows"]] == names
    bytes_ = {row["messages"]: row["token_bytes"] for row in setting["rows"]}
    assert (bytes_["k = 10"], bytes_["k = 64"]) == pytest.approx((40, 256), rel=0.05)
    rate = float(slow["link"].partition("kbit")[0]) * 1e3
    message = slow["rows"][0]["activation"] + slow["rows"][0]["gradient"]
    assert 8 * message * 8 / rate == pytest.approx(15 * unlimited["compute_s"], rel=0.06), (
        "8 micro-batches, less headers"
    )
    times = {(row["messages"], row["what"]): row["times"] for row in setting["generation"]}
    assert times["k = 10", "prompts"] > 3 > times["uncompressed", "prompts"] == 1, "a hundredth of the bytes"
    assert slow["rows"][0]["seconds"] > 0.97 * 8 * 8 * slow["rows"][0]["activation"] / rate, "the link has its rate"
    assert {row["what"] for row in setting["generation"]} == {"prompts", "generated"}
