"""What is known of connections and the rate that they may share."""

import os
import time

import pytest
import torch
import torch.distributed as dist

import torch_lowcomm as lc

DEADLINE_S = 60.0
ELEMENTS = 1 << 18


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_connections_are_reported(r):
    began = time.monotonic()
    r.init("lowcomm", pg_options=lc.Options(policy="all_gather=sym8", min_bytes=0, connections=2))
    every = torch.empty(2 * ELEMENTS)
    dist.all_gather_into_tensor(every, torch.ones(ELEMENTS))
    (found,) = lc.connections(dist.group.WORLD).values()
    assert [(one["peer"], one["lane"]) for one in found] == [(1 - r.rank, x) for x in ("control", "bulk 0", "bulk 1")]
    assert all(one["connected"] and one["times_made"] == 1 and one["cipher"] == "" for one in found)
    assert all(0 < one["least_round_trip_s"] <= one["round_trip_s"] < time.monotonic() - began for one in found)
    assert ELEMENTS < sum(one["sent_bytes"] for one in found) < 1.05 * ELEMENTS
    assert ELEMENTS < sum(one["received_bytes"] for one in found) < 1.05 * ELEMENTS
    # Both ends of a near link begin with Reno: one on which BBR ran would stay paced (csrc/transport/tcp/pace.h).
    assert {one["congestion"] for one in found} == {"reno"}

    dist.barrier()  # nobody leaves while another is still connecting
    dist.destroy_process_group()
    assert lc.connections() == {}


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_a_process_keeps_to_its_rate(r):
    os.environ["LOWCOMM_RATE"] = "8mbit"
    r.init("lowcomm", pg_options=lc.Options(policy="all_gather=sym8", min_bytes=0))
    every = torch.empty(2 * ELEMENTS)
    began = time.monotonic()
    for _ in range(6):
        dist.all_gather_into_tensor(every, torch.ones(ELEMENTS))
    # A byte a microsecond; what was not paid for yet when the last op was done is a piece of 512 KiB at most.
    assert time.monotonic() - began > 1e-6 * (6 * ELEMENTS - (1 << 19))
    dist.destroy_process_group()


@pytest.mark.parametrize("rate", ["fast", "10", "-1mbit", "0mbit", "nanmbit", "10Mbyte"])
@pytest.mark.on(1, timeout=DEADLINE_S)
def test_a_rate_that_is_none_is_refused(r, rate):
    os.environ["LOWCOMM_RATE"] = rate
    with pytest.raises(ValueError, match=f"LOWCOMM_RATE: expected a number and kbit, mbit or gbit.* got '{rate}'"):
        r.init("lowcomm", pg_options=lc.Options())
