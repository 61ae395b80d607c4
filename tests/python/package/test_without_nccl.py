"""Groups that go on when a peer is lost, and scripts that ask for gloo, use NCCL only where it is asked for."""

import copy
from datetime import timedelta

import pytest
import torch.distributed as dist

import torch_lowcomm as lc
from torch_lowcomm import as_gloo
from torch_lowcomm._create import without_nccl


@pytest.mark.parametrize(
    ("given", "variable", "made"), [(None, "", False), (True, "", True), (None, "1", None), (False, "1", False)]
)
def test_what_is_asked_for_counts(monkeypatch, given, variable, made):
    monkeypatch.setenv("LOWCOMM_NCCL", variable)
    options = lc.Options("all_reduce=minmax8", nccl=given, min_bytes=7, timeout=timedelta(seconds=5))
    got = without_nccl(options)
    assert got.nccl is made
    assert (got.policy, got.min_bytes, got.timeout) == (options.policy, 7, timedelta(seconds=5))
    assert without_nccl(None).nccl is (None if variable else False)
    assert options.nccl is given, "the caller's are left alone"


def test_a_script_that_asks_for_gloo_gets_no_nccl(monkeypatch):
    monkeypatch.delenv("LOWCOMM_NCCL", raising=False)
    made = []
    monkeypatch.setattr(as_gloo, "create_backend", lambda opts, options: made.append(copy.copy(options)))
    as_gloo._GlooStandIn(dist.HashStore(), 0, 1)
    assert [options.nccl for options in made] == [False]


def test_torchft_and_memberships_get_no_nccl(monkeypatch):
    monkeypatch.delenv("LOWCOMM_NCCL", raising=False)
    machine = lc.Membership(dist.HashStore(), "a", min_machines=1)
    assert machine._connector._options.nccl is False
    machine.leave()
    pytest.importorskip("torchft")
    from torch_lowcomm.torchft import ProcessGroupLowcomm

    assert ProcessGroupLowcomm()._options.nccl is False
