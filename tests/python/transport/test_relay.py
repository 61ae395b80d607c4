"""Ranks that nobody can dial: they dial others, and two of them meet at `python -m torch_lowcomm relay`."""

import os
import sys

import pytest
import ranks
import torch
import torch.distributed as dist
from listening import listening
from test_tcp import SECRET, needs_tls

import torch_lowcomm as lc

DEADLINE_S = 90.0
ELEMENTS = 100_000


@pytest.fixture
def relay():
    with listening("relay") as at:
        yield at


@pytest.mark.parametrize(
    ("alone", "secret"),
    [
        ((0,), ""),
        pytest.param((0, 2), "", marks=pytest.mark.later),
        pytest.param((0, 2), SECRET, marks=[pytest.mark.later, needs_tls]),
    ],
)
@pytest.mark.on(3, timeout=DEADLINE_S)
def test_ranks_that_only_dial(r, relay, alone, secret):
    """Two of them meet at the relay; one reaches all others without it."""
    if secret:
        os.environ["LOWCOMM_SECRET"] = secret
    if r.rank in alone:
        os.environ["LOWCOMM_DIAL_ONLY"] = "1"
        if len(alone) > 1:
            os.environ["LOWCOMM_RELAY"] = relay
    r.init("lowcomm", pg_options=lc.Options(policy="all_reduce=sym8", min_bytes=0))
    ones = torch.ones(ELEMENTS)
    dist.all_reduce(ones)
    assert torch.allclose(ones, torch.full_like(ones, float(r.size)), rtol=0.02)
    exact = torch.arange(ELEMENTS)
    dist.all_reduce(exact)
    assert torch.equal(exact, r.size * torch.arange(ELEMENTS))
    for one in lc.connections(dist.group.WORLD).popitem()[1]:
        both_alone = r.rank in alone and one["peer"] in alone
        assert one["path"] == (f"relay {relay}" if both_alone else "direct"), one
        assert bool(one["cipher"]) == bool(secret)
    dist.barrier()  # nobody leaves before all have looked
    dist.destroy_process_group()


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_what_cannot_be_reached_is_named(r):
    os.environ.update(LOWCOMM_DIAL_ONLY="1")
    with pytest.raises((ValueError, dist.DistBackendError), match="expected a relay between ranks 0 and 1"):
        r.init("lowcomm", timeout_s=20)
    os.environ["LOWCOMM_DIAL_ONLY"] = "yes"
    with pytest.raises(ValueError, match="LOWCOMM_DIAL_ONLY: expected 0 or 1, got 'yes'"):
        r.init("lowcomm", timeout_s=20)
    os.environ.update(LOWCOMM_DIAL_ONLY="1", LOWCOMM_LISTEN=":0")
    with pytest.raises(ValueError, match="LOWCOMM_DIAL_ONLY: expected no LOWCOMM_LISTEN"):
        r.init("lowcomm", timeout_s=20)
    assert lc.connections() == {}


def test_a_relay_that_cannot_listen_says_so():
    status, _, err = ranks.run_command(
        [sys.executable, "-m", "torch_lowcomm", "relay", "--listen", "29700"], deadline_s=60
    )
    assert status == 2
    assert "expected host:port or :port, got '29700'" in err
