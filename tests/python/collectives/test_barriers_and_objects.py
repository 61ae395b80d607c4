"""Barriers hold until all are in, the group's monitored_barrier names who is missing, and objects go by every collective."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist


def _barriers(r):
    r.init("lowcomm")
    for k in range(3):
        time.sleep(0.02 * ((r.rank + k) % r.size))
        r.say(f"in{k}.{r.rank}")
        dist.barrier()
        assert all(r.path(f"in{k}.{q}").exists() for q in range(r.size)), "left the barrier before all were in it"
    dist.barrier(async_op=True).wait()
    group = dist.group.WORLD
    group.monitored_barrier(datetime.timedelta(seconds=10))
    group.monitored_barrier(datetime.timedelta(seconds=10), wait_all_ranks=True)
    # The last rank stays away: rank 0 names it.
    if r.rank == 0:
        with pytest.raises(RuntimeError, match=f"(?i)ranks? {r.size - 1}"):
            group.monitored_barrier(datetime.timedelta(seconds=3), wait_all_ranks=True)
        r.say("named")
    elif r.rank < r.size - 1:
        with pytest.raises(RuntimeError):
            group.monitored_barrier(datetime.timedelta(seconds=20), wait_all_ranks=True)
    else:
        r.hear("named")
    dist.destroy_process_group()  # here, for gloo's connections did not survive that


@pytest.mark.later
def test_barriers(pair, quad):
    pair(_barriers)
    quad(_barriers)


def _objects(r):
    r.init("lowcomm")
    mine = {"rank": r.rank, "text": "x" * (1000 * r.rank), "tensor": torch.arange(r.rank)}
    got = [None] * r.size
    dist.all_gather_object(got, mine)
    assert [g["rank"] for g in got] == list(range(r.size))
    assert all(torch.equal(g["tensor"], torch.arange(q)) for q, g in enumerate(got))
    items = [mine, None, 3] if r.rank == r.size - 1 else [None] * 3
    dist.broadcast_object_list(items, src=r.size - 1)
    assert items[0]["rank"] == r.size - 1
    assert items[1:] == [None, 3]
    gathered = [None] * r.size if r.rank == 0 else None
    dist.gather_object(mine["text"], gathered, dst=0)
    assert r.rank or [len(t) for t in gathered] == [1000 * q for q in range(r.size)]
    out = [None]
    dist.scatter_object_list(out, [f"for {q}" for q in range(r.size)] if r.rank == 0 else None, src=0)
    assert out == [f"for {r.rank}"]
    if r.rank == 0:
        dist.send_object_list(["a", {"b": 1}], dst=1)
    elif r.rank == 1:
        items = [None, None]
        dist.recv_object_list(items, src=0)
        assert items == ["a", {"b": 1}]


def test_object_collectives(pair, quad):
    pair(_objects)
    quad(_objects)
