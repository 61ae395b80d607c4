"""lc.DiLoCoX whose rank and interval adapt: they fall with the spectrum of averages, to the same numbers on all ranks."""

import math

import pytest
import torch
from torch import nn

import torch_lowcomm as lc

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
