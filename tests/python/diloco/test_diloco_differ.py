"""Ranks that make unlike lc.DiLoCoX: every one is told what differs, and of which ranks; none waits."""

import diloco_model
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_lowcomm as lc

NEVER_S = 600.0  # the groups' time-out, longer than the harness waits: what is told is told at once


class _Narrow(diloco_model.Net):
    def __init__(self):
        super().__init__()
        self.small = nn.Linear(48, 5)


class _Renamed(diloco_model.Net):
    def __init__(self):
        super().__init__()
        self.tiny = self.small
        del self.small


def _made(every=4, network=diloco_model.Net, nudge=0.0, named=True, **options):
    torch.manual_seed(7)
    model = network()
    with torch.no_grad():
        model.down.weight[3, 5] += nudge
    return lc.DiLoCoX(torch.optim.SGD(model.parameters()), every, model=model if named else None, **options)


DIFFERENT = [
    ({"every": 5}, ["sync_every differs", "has '4'", "has '5'"]),
    ({"rank": 4}, ["rank differs", "has 'None'", "has '4'"]),
    ({"codec": "sym8:bucket=128"}, ["codec differs", "has 'sym4:bucket=128'", "has 'sym8:bucket=128'"]),
    ({"codec": None}, ["codec differs", "has 'sym4:bucket=128'", "has 'none'"]),
    ({"mode": "restart"}, ["mode differs", "has 'continue'", "has 'restart'"]),
    ({"outer_lr": 0.5}, ["outer_lr differs", "has '0.7'", "has '0.5'"]),
    ({"fragments": 2}, ["fragments differs", "has '1'", "has '2'"]),
    ({"error_feedback": 0.9}, ["error_feedback differs", "has 'True'", "has '0.9'"]),
    ({"residual_dtype": "int8"}, ["residual_dtype differs", "has 'float32'", "has 'int8'"]),
    ({"seed": 1}, ["seed differs", "has '0'", "has '1'"]),
    ({"network": _Narrow}, ["parameters differs", "hash"]),
    ({"network": _Renamed}, ["parameters differs", "hash"]),
    ({"named": False}, ["parameters differs", "hash"]),
    ({"nudge": 1e-3}, ["parameters' values (seed alike or broadcast) differs"]),
    ({"average_buffers": True}, ["parameters differs", "buffers"]),
]


@pytest.mark.on("trio", group={"timeout_s": NEVER_S})
def test_ranks_that_differ_are_told(r):
    for options, parts in DIFFERENT:
        with pytest.raises(dist.DistBackendError) as caught:
            _made(**(options if r.rank == 1 else {}))
        text = str(caught.value)
        assert all(part in text for part in [*parts, "rank 1", f"rank {r.rank if r.rank != 1 else 0}"]), (options, text)


WRONG = [
    ({"every": 2.5}, TypeError, "sync_every: expected an integer, got 2.5"),
    ({"codec": "nope4"}, ValueError, "nope4"),
    ({"named": False, "average_buffers": True}, ValueError, "average_buffers: expected model= too, got none"),
]


@pytest.mark.on("trio", group={"timeout_s": NEVER_S})
def test_one_ranks_mistake_reaches_the_others(r):
    for options, error, part in WRONG:
        with pytest.raises(error if r.rank == 1 else dist.DistBackendError) as caught:
            _made(**(options if r.rank == 1 else {}))
        text = str(caught.value)
        assert part in text and (r.rank == 1 or "rank 1" in text), (options, text)
    # The default group is none the worse.
    _made().finish()


@pytest.mark.on("pair", group={"timeout_s": NEVER_S})
def test_outer_parameters_that_differ_are_found(r):
    """A rank's outer parameters differ, which only a fault of memory should bring about."""
    model, optimizer = diloco_model.fresh(mode="sync", check_every=1)
    diloco_model.train(model, optimizer, r.rank, range(4))
    if r.rank == 1:
        optimizer._outer.carried()[0][1][3, 4] += 1e-3  # the loop's own memory
    with pytest.raises(dist.DistBackendError) as caught:
        diloco_model.train(model, optimizer, r.rank, range(4, 16))
    text = str(caught.value)
    assert all(part in text for part in ("outer parameters' checksum differs", "rank 0", "rank 1")), text
