"""`python benchmarks convergence subspace` at 3 ranks, and the boundaries that it brings itself."""

import importlib

import pytest
import torch
from example_main import quick_convergence


@pytest.mark.slow
def test_convergence_quick(tmp_path):
    content = quick_convergence("subspace", 5, tmp_path)
    runs = {run["name"]: run for run in content["curves"]}
    free, constrained, coded = (runs[name] for name in ("free", "constrained, 32", "constrained, 32 in 8 bits"))
    assert 4 * 64 <= free["token_bytes"] < 4 * 64 * 1.01, "all numbers, and the frames"
    assert 4 * 8 <= constrained["token_bytes"] < 4 * 8 * 1.02, "and the frames of short messages"
    # A token's own scale takes 8 bytes, and its 8 coefficients are filled up to 16: of more of them it is a quarter.
    assert coded["token_bytes"] < 0.8 * constrained["token_bytes"]
    assert runs["1 bit of all"]["token_bytes"] == 64 / 8 + 4
    assert constrained["down_rank"] < 8 < free["down_rank"], "the subspace has 8 dimensions"
    assert constrained["loss"][-1] < constrained["loss"][0]


@pytest.mark.slow
def test_depth_quick(tmp_path):
    runs = {run["name"]: run for run in quick_convergence("subspace_depth", 2, tmp_path)["curves"]}
    free, constrained = runs["free, 4 blocks"], runs["constrained, 4 blocks"]
    assert len(free["down_ranks"]) == 2 and free["down_ranks"][0] > free["down_ranks"][1], (
        "the first weights are random"
    )
    assert all(rank < 8 for rank in constrained["down_ranks"]), "the subspace has 8 dimensions"
    assert constrained["token_bytes"] < free["token_bytes"] / 7


@pytest.mark.slow
def test_ratios_quick(tmp_path):
    """Rows after as many seconds on a link, of which those with fewer bytes a token take fewer a step."""
    options = ("--only", "ratios", "--seconds", str(tmp_path / "seconds.png"))
    content = quick_convergence("subspace", 1, tmp_path, *options)
    rows = {(row["link"], row["name"]): row for row in content["compared"]}
    assert len(rows) == 2 * 5
    for link in {link for link, _ in rows}:
        free, eighth = rows[link, "free, 4 stages"], rows[link, "d / 8"]
        assert eighth["seconds"] == free["seconds"]
        assert rows[link, "d / 64"]["step_s"] < eighth["step_s"], "stages of the same kind"
    # What a step takes is this machine's; with stages of as many seconds, the bytes of a token decide.
    ratios, stage = (importlib.import_module(name) for name in ("convergence.subspace.ratios", "subspace.wan"))
    same = stage.StageSeconds([1e-6, 1e-6], [2e-6, 2e-6])
    steps = {run["name"]: ratios.step_s(run, content["configurations"][run["name"]], same) for run in content["curves"]}
    assert steps["d / 64"] == min(steps.values()) < 0.5 * steps["free, 4 stages"] == 0.5 * max(steps.values())
    assert (tmp_path / "seconds.png").read_bytes().startswith(b"\x89PNG")


def test_a_loss_lies_between_two_points():
    target_steps = importlib.import_module("subspace.target_steps")
    assert target_steps.loss_at([20, 40, 60], [3.0, 2.0, 1.5], 45) == pytest.approx(1.875)
    assert target_steps.loss_at([20, 40, 60], [3.0, 2.0, 1.5], 60) == 1.5
    assert target_steps.loss_at([20, 40, 60], [3.0, 2.0, 1.5], 19) is None
    assert target_steps.loss_at([20, 40, 60], [3.0, 2.0, 1.5], 61) is None


def _round_trip(boundary, x, gradient):
    """The tensors that arrive forward and back at a boundary's two sides."""
    x = x.clone().requires_grad_()
    ids = torch.zeros(x.shape[:2], dtype=torch.int64)
    y = boundary.decoder(None, 0, None)(boundary.encoder(None, 0, None)(x, ids), ids)
    y.backward(gradient)
    return y.detach(), x.grad


def test_boundaries_round_both_ways_a_token_by_itself():
    rounded = importlib.import_module("convergence.subspace.rounded")
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    whole = _round_trip(rounded.Whole(16), x, gradient)
    assert torch.equal(whole[0], x) and torch.equal(whole[1], gradient)
    for found, given in zip(_round_trip(rounded.TopK(16, 4), x, gradient), (x, gradient), strict=True):
        kept = found != 0
        assert kept.sum(-1).eq(4).all() and torch.equal(found[kept], given[kept])
        smallest = torch.where(kept, given.abs(), torch.inf).amin(-1)
        assert (torch.where(kept, 0.0, given.abs()).amax(-1) <= smallest).all()
    for found, given in zip(_round_trip(rounded.OneBit(16), x, gradient), (x, gradient), strict=True):
        torch.testing.assert_close(found, given.sign() * given.abs().mean(-1, keepdim=True))


def test_ratios_are_of_the_same_seed():
    gates = importlib.import_module("convergence.subspace.gates")
    runs = {
        "free": [{"loss": [9.0] + [2.0] * 5, "validation": 1.0}, {"loss": [4.0] * 6, "validation": 2.0}],
        "constrained, 32": [{"loss": [9.0] + [3.0] * 5, "validation": 1.1}, {"loss": [4.0] * 6, "validation": 2.0}],
    }
    flattered, training, validation = gates.gates(runs, quick=False)
    assert flattered.passed, "a run that trains worse than the free one"
    assert training.name == "training, constrained, 32 / free" and training.value == pytest.approx(1.25)
    assert validation.name == "validation, constrained, 32 / free" and validation.value == pytest.approx(1.05)
    assert validation.passed and not training.passed
