"""SubspaceAdamW on a model without constrained weights is AdamW, and says so."""

import logging

import subspace_case
import torch
from torch import nn

import torch_lowcomm as lc


def _warnings(caplog, make):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "torch_lowcomm"):
        make()
    return [record.getMessage() for record in caplog.records]


def test_a_model_that_nobody_constrained_is_warned_of(caplog):
    model = nn.Linear(8, 8)
    (said,) = _warnings(caplog, lambda: lc.SubspaceAdamW(model, lr=1e-3))
    assert "expected a model that lc.subspace.constrain or cut has constrained, got one without" in said


def test_a_constrained_model_is_not(caplog):
    texts = _warnings(caplog, lambda: lc.SubspaceAdamW(subspace_case.constrained(torch.float32), lr=1e-3))
    assert not texts
    last = subspace_case.cuts(subspace_case.constrained(torch.float32), 2)[1]
    assert not _warnings(caplog, lambda: lc.SubspaceAdamW(last, lr=1e-3))
