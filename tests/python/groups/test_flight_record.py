"""A group's account of its ops while it lives, `lc.flight_record()`. A lost group's file: test_faults.py."""

import os
import time

import pytest
import torch
import torch.distributed as dist

import torch_lowcomm as lc

N = 1 << 18
OPS = "ops"


def _record(group=None):
    (record,) = lc.flight_record(group or dist.group.WORLD).values()
    return record


def _gather(r, n=N):
    return dist.all_gather_into_tensor(torch.empty(n * r.size), torch.ones(n), async_op=True)


def test_of_a_living_group(r):
    options = {"min_bytes": 0, "flight_record": 5}
    r.init("lowcomm", pg_options=lc.Options(policy="all_gather=minmax8; p2p=sym4", **options))
    name = dist.group.WORLD.group_name
    for _ in range(3):
        _gather(r).wait()
    dist.all_reduce(torch.ones(10))
    works = [dist.irecv(torch.empty(N), 1 - r.rank, tag=4), dist.isend(torch.ones(N), 1 - r.rank, tag=4)]
    for work in works:
        work.wait()
    record = lc.flight_record()[name]
    assert record == {**_record(), "unix_time_s": record["unix_time_s"], OPS: record[OPS]}
    assert (record["format"], record["group"], record["size"], record["rank"]) == (1, name, r.size, r.rank)
    assert (record["pid"], record["because"], record["global_rank"]) == (os.getpid(), "", r.rank)
    assert abs(record["unix_time_s"] - time.time()) < 60
    ops = record[OPS]
    assert [op["op"] for op in ops] == ["all_gather"] * 2 + ["all_reduce", "recv with tag 4", "send with tag 4"]
    assert [op["sequence"] for op in ops] == [2, 3, 4, 1, 1], "the first of six has left"
    for op in ops:
        assert op["state"] == "done", op
        assert op["queued_s"] <= op["started_s"] <= op["ended_s"] <= 0, op
        assert (op["missing"], op["wait"], op["error"]) == ([], None, None), op
    said = ops[1]["description"]
    assert (said["tensors"], said["dtype"], said["elements a rank"]) == ("1", "float32", str(N))
    assert said["codec"] == "minmax8:bucket=1024"
    codes = lc.codec("minmax8:bucket=1024").encoded_bytes(N)
    assert codes < ops[1]["sent_bytes"] < 1.01 * codes
    assert codes < ops[1]["received_bytes"] < 1.01 * codes
    assert ops[2]["description"]["codec"] == "none"
    assert ops[3]["description"]["peer"] == str(1 - r.rank)
    dist.barrier()
    # One that waits for a rank which has not come, and what is queued behind it.
    if r.rank == 0:
        works = [_gather(r), _gather(r)]
        while not (record := _record())[OPS][-2]["wait"]:
            time.sleep(0.001)
        waiting, queued = record[OPS][-2:]
        assert (waiting["state"], queued["state"]) == ("under way", "queued")
        assert waiting["wait"]["rank"] == 1
        assert waiting["wait"]["frame"] == 0
        assert waiting["wait"]["since_s"] <= 0
        assert waiting["missing"] == [{"rank": 1, "received": 0, "expected": 6}], waiting  # five frames of codes
        assert queued["started_s"] is None
        r.say("seen")
    else:
        r.hear("seen")
        works = [_gather(r), _gather(r)]
    for work in works:
        work.wait()
    assert [op["state"] for op in _record()[OPS][-2:]] == ["done"] * 2


def test_the_option():
    assert lc.Options().flight_record is None
    assert lc.Options(flight_record=7).flight_record == 7
    assert "flight_record=7" in repr(lc.Options(flight_record=7))
    for wrong in (-1, 65537):
        with pytest.raises(ValueError, match=rf"flight_record: expected 0 \.\.\. 65536, got {wrong}"):
            lc.Options(flight_record=wrong)


@pytest.mark.on(1, env={"LOWCOMM_FLIGHT_RECORD": "many"})
def test_the_environments_number_is_checked(r):
    with pytest.raises(ValueError, match="LOWCOMM_FLIGHT_RECORD: expected an integer, got 'many'"):
        r.init("lowcomm")
