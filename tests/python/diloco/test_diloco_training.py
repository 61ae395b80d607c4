"""lc.DiLoCoX against what its numbers should be: DDP's weights, the format's bytes, a loss that falls on text."""

import os

import ddp_model
import pytest
import torch
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm import _C


@pytest.mark.on("pair", group={})
def test_an_outer_step_every_step_is_ddp(r):
    ddp = ddp_model.make()
    ddp_model.train(ddp, r.rank, 12, optimizer=torch.optim.SGD(ddp.parameters(), lr=0.1), spare=True)
    torch.manual_seed(7)
    model = ddp_model.Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = lc.DiLoCoX(inner, 1, mode="sync", outer_lr=1, outer_momentum=0, codec=None)
    ddp_model.train(model, r.rank, 12, optimizer=optimizer, spare=True)
    expected = ddp_model.weights(ddp)
    assert all((w - expected[name]).abs().max() <= 1e-6 for name, w in ddp_model.weights(model).items())


def _on_a_form(r, scalar):
    """A run, rank 0 of which has the loops of the barest CPU."""
    if scalar and r.rank == 0:
        os.environ["LOWCOMM_KERNELS"] = "scalar"  # before the first op, which reads it
    r.init()
    torch.manual_seed(7)
    model = ddp_model.Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = lc.DiLoCoX(inner, 2, codec="qsgd4:bucket=64", rank=4, check_every=1)
    ddp_model.train(model, r.rank, 9, optimizer=optimizer, spare=True)
    optimizer.finish()
    return _C.kernels(), ddp_model.weights(model)


def test_different_cpus_give_the_same_bits():
    ddp_model.expect_the_same_bits(_on_a_form)


ROWS, COLUMNS = 2048, 1024


@pytest.mark.parametrize(
    ("codec", "projection", "rank"),
    [
        (None, None, None),
        ("sym4:bucket=128", None, None),
        ("gauss2", None, None),
        ("sym4:bucket=64", "sym8:bucket=64", 128),
    ],
    ids=str,
)
@pytest.mark.on("pair", group={})
def test_bytes_are_the_formats(r, codec, projection, rank):
    model = nn.Linear(COLUMNS, ROWS)
    optimizer = lc.DiLoCoX(
        torch.optim.SGD(model.parameters(), lr=0.1),
        1,
        mode="sync",
        codec=codec,
        projection_codec=projection,
        rank=rank,
        check_every=0,
    )
    lc.reset_stats()
    for _ in range(3):
        model(torch.randn(4, COLUMNS)).square().mean().backward()
        optimizer.step()
    (ops,) = [ops for ops in lc.stats().values() if "outer_step" in ops]
    sent, stats = optimizer.report["sent_bytes"], ops["outer_step"]
    of = lc.codec(codec or "none")
    sides = [(of, ROWS)]  # the bias
    if rank is None:
        sides += [(of, ROWS * COLUMNS)]
    else:
        sides += [(lc.codec(projection), rank * ROWS), (of, rank * COLUMNS)]
    # Between two ranks each slice goes out once: as a contribution, or as a sum.
    codes = sum(ddp_model.slice_bytes(side, 512, n, 2) for side, n in sides)
    assert codes < sent <= 1.01 * codes, "codes, headers and a description"
    assert stats["calls"] == 3 and stats["wire_bytes"] == 3 * sent
    assert stats["raw_bytes"] == 3 * 4 * (ROWS + ROWS * COLUMNS)
