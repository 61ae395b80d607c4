"""lc.DiLoCoX whose rank and interval adapt: they fall with the spectrum of averages, to the same numbers on all ranks."""

import math
import os

import ddp_model
import pytest
import torch
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm import _C

RANK, EVERY, STEPS = 8, 8, 96
ADAPTIVE = {"rank": RANK, "adapt_rank": True, "adapt_sync_every": True, "codec": "sym8:bucket=64"}


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


def _falls(r, mode, error_feedback):
    r.init()
    return _train(r, (RANK, 2, RANK), mode=mode, error_feedback=error_feedback)


def _expect_to_fall(ended):
    for seen, _, parameters in ended:
        assert seen == ended[0][0]
        assert all(map(torch.equal, parameters, ended[0][2]))
    (wide, long, _), (narrow, short, effective), (again, shorter, _) = ended[0][0]
    assert wide >= RANK - 1 and narrow <= 3, "as the spectrum"
    assert again <= math.ceil(narrow), "an average has no more directions than its factors"
    assert effective <= RANK
    for rank, interval in ((wide, long), (narrow, short), (again, shorter)):
        assert interval == max(EVERY // 4, int(EVERY * rank / RANK + 0.5))


@pytest.mark.parametrize("error_feedback", [False, True], ids=["without feedback", "feedback"])
@pytest.mark.parametrize("mode", ["sync", "continue"])
def test_rank_and_interval_fall_with_the_spectrum(pair, mode, error_feedback):
    _expect_to_fall(pair(_falls, mode, error_feedback))


def test_of_four_ranks(quad):
    _expect_to_fall(quad(_falls, "continue", True))


def _on_a_form(r, scalar):
    """A run, rank 0 of which has the loops of the barest CPU."""
    if scalar and r.rank == 0:
        os.environ["LOWCOMM_KERNELS"] = "scalar"  # before the first op, which reads it
    r.init()
    seen, _, parameters = _train(r, (RANK, 2), mode="continue")
    ended = {str(i): parameter for i, parameter in enumerate(parameters)}
    return _C.kernels(), ended | {"ranks and intervals": torch.tensor(seen, dtype=torch.float64)}


def test_different_cpus_come_to_the_same_ranks():
    ddp_model.expect_the_same_bits(_on_a_form)


def _resumes(r):
    """A checkpoint in the narrow part, where the rank has fallen; the rest of it again from there."""
    r.init()

    def fresh():
        torch.manual_seed(7)
        model = nn.Linear(64, 48)
        return model, lc.DiLoCoX(torch.optim.SGD(model.parameters(), lr=0.1), EVERY, model=model, **ADAPTIVE)

    def steps(model, optimizer, numbers):
        for step in numbers:
            generator = torch.Generator().manual_seed(100 * step + r.rank)
            width = RANK if step < STEPS else 2
            torch.manual_seed(3)
            left, right = (torch.linalg.qr(torch.randn(n, RANK))[0][:, :width] for n in (48, 64))
            moves = left @ right.T + torch.randn(48, 64, generator=generator) * 1e-4
            ((model.weight * moves).sum() + model.bias.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = fresh()
    steps(model, optimizer, range(STEPS))
    high = optimizer.report["rank"]
    steps(model, optimizer, range(STEPS, 2 * STEPS))
    saved = optimizer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    low = optimizer.report["rank"]
    steps(model, optimizer, range(2 * STEPS, 3 * STEPS))
    again, resumed = fresh()
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    steps(again, resumed, range(2 * STEPS, 3 * STEPS))
    equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    return high, low, equal, resumed.report == {**optimizer.report, **_own(resumed)}


def _own(optimizer):
    return {name: value for name, value in optimizer.report.items() if name.endswith("_s") or name.startswith("total_")}


def test_a_rank_that_has_fallen_is_resumed(pair):
    for high, low, equal, same_report in pair(_resumes):
        assert low <= 3 and high >= RANK - 1
        assert equal and same_report
