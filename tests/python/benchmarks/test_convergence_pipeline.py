"""`python benchmarks convergence aq` at 4 ranks, and how it cuts its model and counts."""

import importlib
import json
import sys

import pytest
import ranks
import torch
import torch.distributed as dist
from example_main import EXAMPLES, quick_convergence
from torch.nn import functional

import torch_lowcomm as lc


@pytest.mark.slow
def test_convergence_quick(tmp_path):
    content = quick_convergence("aq", 8, tmp_path)
    runs = {run["name"]: run for run in content["curves"]}
    assert runs["exact"]["cache_bytes"] == 0 < runs["AQ gauss2/gauss4"]["cache_bytes"]
    assert 32 <= runs["exact"]["forward_bits"] < 32.3, "the frames of a boundary and nothing else"


@pytest.mark.slow
def test_replicas_quick(tmp_path):
    content = quick_convergence("aq_replicas", 2, tmp_path, "--seconds", str(tmp_path / "seconds.png"))
    runs = {run["name"]: run for run in content["curves"]}
    exact, coded = runs["exact"], runs["AQ gauss2/gauss4, QuantizedAdam"]
    assert exact["coded"] == 0 < runs["AQ gauss2/gauss4"]["coded"] < 0.1, "parameters' gradients are most of it"
    assert exact["replicas_bits"] == 32
    # A quarter of its steps are QuantizedAdam's warm-up.
    assert coded["replicas_bits"] == pytest.approx((32 + 3 * 4.03) / 4, rel=0.01)
    assert coded["coded"] == pytest.approx(1 - 8 / coded["replicas_bits"], abs=0.05)
    assert coded["loss"][-1] < 1.03 * exact["loss"][-1]
    links = {row["link"] for row in content["compared"]}
    assert len(links) == 8 and {"10gbit, here", "100mbit, paper"} <= links
    assert (tmp_path / "seconds.png").read_bytes().startswith(b"\x89PNG")
    # Of the runs in the JSON, by themselves: the paper's stages are no measurement, so they take as long.
    command = [sys.executable, str(EXAMPLES.parent / "benchmarks"), "convergence", "aq_replicas"]
    command += ["--curves", "run.json", "--seconds", "again.png", "--json", "again.json"]
    status, out, err = ranks.run_command(command, deadline_s=120, cwd=tmp_path)
    assert status == 0, f"{out}\n{err}"
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["trained_at"] == json.loads((tmp_path / "run.json").read_text())["versions"]["commit"]
    both = [[row for row in of["compared"] if "paper" in row["link"]] for of in (content, again)]
    assert len(both[0]) == 4 * 4 and both[0] == both[1]
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [2, 4, 8])
def test_stages_are_the_whole_model(count):
    model, parts = importlib.import_module("model"), importlib.import_module("convergence.pipeline.parts")
    torch.manual_seed(0)
    gpt = model.GPT()
    x, y = torch.randint(model.VOCABULARY, (2, 3, 64))
    activations = x
    stages = [parts.part(gpt, index, count) for index in range(count)]
    for stage in stages:
        activations = stage(activations)
    loss = functional.cross_entropy(activations.flatten(0, 1), y.flatten())
    assert torch.equal(loss, gpt(x, y))
    assert sum(p.numel() for stage in stages for p in stage.parameters()) == sum(p.numel() for p in gpt.parameters())


def test_changes_are_those_of_all_boundaries():
    runs = importlib.import_module("convergence.pipeline.runs")
    ranks = [{"mean_value": 3.0, "mean_change": 0.5}, {"mean_value": 1.0, "mean_change": 0.5}, {"forward": 0.0}]
    assert runs.changes(ranks) == 0.25
    assert runs.changes(ranks[2:]) is None


def test_runs_are_compared_with_exact_ones_that_are_otherwise_alike():
    gates, presets = (importlib.import_module(f"convergence.pipeline.{name}") for name in ("gates", "presets"))
    runs = importlib.import_module("convergence.pipeline.runs")
    every = {name: c for part in runs.PARTS.values() for name, c in part.items()}
    assert len(every) == sum(map(len, runs.PARTS.values())), "names are of one part"
    for name, c in every.items():
        exact = every[gates.baseline(name, every)]
        assert not exact.codecs and not exact.store
        for setting in ("shuffle", "noise", "dtype", "pretrain", "lr", "task", "samples", "epochs", "point"):
            assert getattr(exact, setting) == getattr(c, setting), name
    for part in (presets.FINE_TUNING, presets.FRESH):
        assert {c.stages for c in part.values()} == {2, 4}
        assert all(part[gates.baseline(name, part)].stages == c.stages for name, c in part.items())


def run(training, validation):
    return {"loss": [9.0, training], "validation": validation}


@pytest.mark.parametrize(
    ("training", "validation", "flattered"),
    [
        ((1.818, 1.818), (3.184, 3.184), 1),  # gauss4 whose blocks span four tokens
        ((1.853, 1.853), (1.82, 1.82), 1),
        ((1.875, 1.875), (1.792, 1.792), 0),
        ((1.9, 1.9), (3.2, 3.2), 0),  # bad, and says so
        ((1.80, 1.80), (1.80, 1.80), 0),
        ((1.86, 1.80), (1.777, 1.90), 1),  # means over seeds
    ],
)
def test_a_run_that_reads_its_rounding_fails(training, validation, flattered, capsys):
    flattery = importlib.import_module("convergence.flattery")
    runs = {"exact": [run(1.853, 1.777)] * 3, "coded": list(map(run, training, validation))}
    gate = flattery.gate(runs, lambda _: "exact")
    assert (gate.value, gate.passed) == (flattered, not flattered)
    assert ("coded reads its messages' rounding" in capsys.readouterr().out) == bool(flattered)
    assert flattery.gate({"coded": runs["coded"]}, lambda _: "exact").passed, "there is nothing to compare it with"


def test_sentences_are_bytes_with_a_class():
    tasks = importlib.import_module("convergence.pipeline.tasks")
    tokens, classes = tasks.training(tasks.SENTENCES, 32, seed=3)
    assert tokens.shape == (32, tasks.CONTEXT) and set(classes.tolist()) == {0, 1}
    assert torch.equal(tokens, tasks.training(tasks.SENTENCES, 32, seed=3)[0])
    held_out = [tuple(row) for batch, _ in tasks.validation(tasks.SENTENCES, 64, 16) for row in batch.tolist()]
    assert len(held_out) == 64
    logits = torch.randn(4, 128)
    assert tasks.loss_of(logits, classes[:4]) == functional.cross_entropy(logits, classes[:4])


def test_seconds_follow_bits_and_rates():
    link = importlib.import_module("convergence.pipeline.link")
    exact, coded = ({"forward_bits": bits, "backward_bits": bits} for bits in (32.0, 4.0))
    times = {rate: [link.PAPER.step_s(rate, run) for run in (exact, coded)] for rate in link.RATES}
    # 32 micro-batches of 180 ms through 8 stages; the paper has 3.8 sequences a second at 10 Gbit/s.
    assert times["10gbit"][1] == pytest.approx(39 * 0.18, rel=0.02)
    assert 32 / times["10gbit"][0] == pytest.approx(4.3, rel=0.1)
    assert times["100mbit"][0] / times["100mbit"][1] > 3.5
    assert times["10mbit"][0] / times["10mbit"][1] == pytest.approx(8, rel=0.15)
    average = link.PAPER.step_s("100mbit", exact | {"replicas_bits": 32.0}) - times["100mbit"][0]
    assert average == pytest.approx(1.5e9 / 8 * 32 / 100e6, rel=0.06)


def _steps(r, kind, codec, steps):
    """Parameters after some steps of an optimizer of replicas, each with gradients of its own, and what it counts."""
    r.init("lowcomm")
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 600)), torch.nn.Parameter(torch.ones(3, 7))]
    draw = torch.Generator().manual_seed(r.rank)
    if kind == "paper":
        sys.path.append(str(EXAMPLES.parent / "benchmarks"))  # the rank is another process
        paper_adam = importlib.import_module("convergence.pipeline.paper_adam")
        optimizer = paper_adam.PaperAdam(weights, lr=0.01, warmup_steps=5, group=dist.group.WORLD, codec=codec)
    else:
        optimizer = lc.QuantizedAdam(weights, lr=0.01, warmup_steps=5, codec=codec)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draw) + 0.5
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().flatten().tolist() for weight in weights], getattr(optimizer, "coded_bytes", None)


def test_the_papers_adam_is_ours_without_codes(pair):
    for steps in (5, 20):
        (ours, _), (others, _) = (pair(_steps, kind, "fp16", steps)[0] for kind in ("ours", "paper"))
        for a, b in zip(ours, others, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=2e-4)
    ranks = pair(_steps, "paper", "sym4:bucket=512", 20)
    assert ranks[0][0] == ranks[1][0], "ranks keep the same bits"
    assert ranks[0][1] == 15 * lc.codec("sym4:bucket=512").encoded_bytes(621)
    assert ranks[0][0] != others


def test_seconds_to_losses_of_exact_training_before_it_learns_by_heart():
    link = importlib.import_module("convergence.pipeline.link")
    exact, coded = f"exact{link._SETTING}", f"AQ{link._SETTING}"
    losses = {exact: [2.0, 1.8, 1.6, 1.5, 1.45, 1.4, 1.9, 2.0], coded: [2.0, 1.9, 1.7, 1.65, 1.6, 1.55, 1.5, 1.5]}
    curves = [
        {"name": name, "seed": 0, "step": [10 * (i + 1) for i in range(8)], "validations": of}
        for name, of in losses.items()
    ]
    rows = {row["name"]: row for row in link.compared({"curves": curves}, {"a link": {exact: 2.0, coded: 0.5}})}
    # Its least loss comes at step 60: targets are those of steps 36 and 48.
    assert [to["target"] for to in rows[exact]["to"]] == pytest.approx([1.54, 1.46])
    first, second = rows[coded]["to"]
    assert first["steps"] == pytest.approx(62) and first["times"] == pytest.approx(2.0 * 36 / (0.5 * 62))
    assert second == {"target": second["target"], "steps": None, "seconds": None, "times": None}
