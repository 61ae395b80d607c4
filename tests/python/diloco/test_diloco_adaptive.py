"""lc.DiLoCoX whose rank and interval adapt: both ways, the same on all ranks, by a measure that costs next to nothing."""

import os

import ddp_model
import pytest
import torch
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm import _C

RANK, EVERY, STEPS = 8, 8, 96
ADAPTIVE = {"rank": RANK, "adapt_rank": True, "adapt_sync_every": True, "window": 2, "codec": "sym8:bucket=64"}


def _train(r, widths, **options):
    """Moves a matrix along as many directions as `widths` says, and along all by little.

    Returns:
        (rank, interval, effective rank) after each part; of every step the bytes of the last message; the weights.
    """
    torch.manual_seed(7)
    model = nn.Linear(64, 48)
    left, right = (torch.linalg.qr(torch.randn(n, RANK))[0] for n in (48, 64))
    torch.manual_seed(r.rank)
    optimizer = lc.DiLoCoX(torch.optim.SGD(model.parameters(), lr=0.1), EVERY, **ADAPTIVE | options)
    seen, sent = [], []
    for width in widths:
        for _ in range(STEPS):
            moves = left[:, :width] @ right[:, :width].T + torch.randn(48, 64) * 1e-4
            ((model.weight * moves).sum() + model.bias.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            sent.append(optimizer.report["sent_bytes"])
        seen.append((optimizer.report["rank"], optimizer.report["sync_every"], optimizer.report["effective_rank"]))
    optimizer.finish()
    return seen, sent, [parameter.detach().clone() for parameter in model.parameters()]


def _both_ways(r, mode, error_feedback):
    r.init()
    return _train(r, (2, RANK, 2), mode=mode, error_feedback=error_feedback)


def _expect_both_ways(ended):
    for seen, _, parameters in ended:
        assert seen == ended[0][0]
        assert all(map(torch.equal, parameters, ended[0][2]))
    (narrow, short, _), (wide, long, effective), (again, shorter, _) = ended[0][0]
    assert narrow <= 3 and wide >= RANK - 1 and again <= 3, "it falls, rises and falls"
    assert effective <= RANK
    for rank, interval in ((narrow, short), (wide, long), (again, shorter)):
        assert interval == int(EVERY * rank / RANK + 0.5)


@pytest.mark.parametrize("error_feedback", [False, True], ids=["without feedback", "feedback"])
@pytest.mark.parametrize("mode", ["sync", "continue"])
def test_rank_and_interval_follow_both_ways(pair, mode, error_feedback):
    _expect_both_ways(pair(_both_ways, mode, error_feedback))


def test_of_four_ranks(quad):
    _expect_both_ways(quad(_both_ways, "continue", True))


def _on_a_form(r, scalar):
    """A run, rank 0 of which has the loops of the barest CPU."""
    if scalar and r.rank == 0:
        os.environ["LOWCOMM_KERNELS"] = "scalar"  # before the first op, which reads it
    r.init()
    seen, _, parameters = _train(r, (2, RANK, 2), mode="continue")
    ended = {str(i): parameter for i, parameter in enumerate(parameters)}
    return _C.kernels(), ended | {"ranks and intervals": torch.tensor(seen, dtype=torch.float64)}


def test_different_cpus_come_to_the_same_ranks():
    ddp_model.expect_the_same_bits(_on_a_form)


def _measures(r):
    """By both measures, with one rank and interval: bytes of each step, and the weights."""
    r.init()
    fixed = {"mode": "sync", "rank_rule": lambda _: RANK, "sync_rule": lambda _: EVERY}
    return [_train(r, (RANK,), **fixed, adapt_to=measure)[1:] for measure in ("pseudo_gradient", "average")]


def test_what_was_to_be_sent_is_known_by_few_bytes(pair):
    """16 of the matrix, two headers and a longer description; and measuring changes nothing."""
    for (new, new_weights), (old, old_weights) in pair(_measures):
        assert all(map(torch.equal, new_weights, old_weights))
        for a, b in zip(new, old, strict=True):
            assert (a, b) == (0, 0) or b + 16 < a <= b + 16 + 2 * 64 + 100


def _as_the_paper(r):
    r.init()
    return _train(r, (2, RANK), mode="sync", adapt_to="average")[0]


def test_of_the_average_the_rank_only_falls(pair):
    for (narrow, *_), (wide, *_) in pair(_as_the_paper):
        assert wide <= narrow <= 3


def _resumes(r):
    """A checkpoint in the wide part, where the rank has risen; the rest of it again from there."""
    r.init()

    def fresh():
        torch.manual_seed(7)
        model = nn.Linear(64, 48)
        return model, lc.DiLoCoX(torch.optim.SGD(model.parameters(), lr=0.1), EVERY, model=model, **ADAPTIVE)

    def steps(model, optimizer, numbers):
        for step in numbers:
            generator = torch.Generator().manual_seed(100 * step + r.rank)
            width = 2 if step < STEPS else RANK
            torch.manual_seed(3)
            left, right = (torch.linalg.qr(torch.randn(n, RANK))[0][:, :width] for n in (48, 64))
            moves = left @ right.T + torch.randn(48, 64, generator=generator) * 1e-4
            ((model.weight * moves).sum() + model.bias.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = fresh()
    steps(model, optimizer, range(STEPS))
    low = optimizer.report["rank"]
    steps(model, optimizer, range(STEPS, 2 * STEPS))
    saved = optimizer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    high = optimizer.report["rank"]
    steps(model, optimizer, range(2 * STEPS, 3 * STEPS))
    again, resumed = fresh()
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    steps(again, resumed, range(2 * STEPS, 3 * STEPS))
    equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    return low, high, equal, resumed.report == {**optimizer.report, **_own(resumed)}


def _own(optimizer):
    return {name: value for name, value in optimizer.report.items() if name.endswith("_s") or name.startswith("total_")}


def test_a_rank_that_has_risen_is_resumed(pair):
    for low, high, equal, same_report in pair(_resumes):
        assert low <= 3 and high >= RANK - 1
        assert equal and same_report
