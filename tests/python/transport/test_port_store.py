"""`init_method="lowcomm://host:port"`: a job of several processes meets and trains over rank 0's port alone."""

import os
import secrets
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist

DEADLINE_S = 60.0
SECRET = "b0pBTzHWtmPlKzjrLn7SdrZxdFKFEE9lbYgOxDY3xPI"


def _meet(r, port, seconds):
    dist.init_process_group(
        "lowcomm",
        init_method=f"lowcomm://127.0.0.1:{port}",
        rank=r.rank,
        world_size=r.size,
        timeout=timedelta(seconds=seconds),
    )


def _by_hand(r, port, by_environment, secret):
    import torch_lowcomm as lc

    os.environ["LOWCOMM_TRANSPORT"] = "tcp"
    if secret:
        os.environ["LOWCOMM_SECRET"] = secret
    if by_environment:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(r.rank),
            "WORLD_SIZE": str(r.size),
        }
        dist.init_process_group("lowcomm", init_method="lowcomm://", timeout=timedelta(seconds=30))
    else:
        _meet(r, port, seconds=30)
    assert all(bool(one["cipher"]) == bool(secret) for one in lc.connections().popitem()[1])
    x = torch.full((5,), float(r.rank))
    dist.all_reduce(x)
    assert x.tolist() == [sum(range(r.size))] * 5
    pair = dist.new_group([0, 1])
    if r.rank < 2:
        dist.all_reduce(x, group=pair)
    store = dist.distributed_c10d._get_default_store()
    assert store.add("here", 1) > 0
    store.set(f"from {r.rank}", f"rank {r.rank}")
    store.wait([f"from {k}" for k in range(r.size)], timedelta(seconds=20))
    assert [store.get(f"from {k}").decode() for k in range(r.size)] == [f"rank {k}" for k in range(r.size)]
    clone = store.clone()
    assert clone.check(["from 0"])
    assert not clone.check(["nobody"])
    with pytest.raises(dist.DistStoreError, match="nobody"):
        clone.wait(["nobody"], timedelta(milliseconds=50))
    store.append("log", "x")
    dist.barrier()
    assert store.get("log") == b"x" * r.size
    assert store.compare_set("log", "other", "new") == b"x" * r.size
    assert store.num_keys() > r.size
    dist.barrier()
    if r.rank == 0:
        assert store.delete_key("log")
        store.multi_set(["a", "b"], ["1", "2"])
    dist.barrier()
    assert not store.check(["log"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("by_environment", "secret"), [(False, ""), (True, ""), (False, SECRET)])
def test_three_ranks_meet_at_one_port(by_environment, secret):
    ranks.run_ranks(_by_hand, 3, ranks.free_port(), by_environment, secret, timeout=DEADLINE_S)


def _other_secret(r, port):
    os.environ |= {"LOWCOMM_TRANSPORT": "tcp", "LOWCOMM_SECRET": secrets.token_urlsafe(32)}
    with pytest.raises((dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
        _meet(r, port, seconds=8)


def test_another_secret_does_not_reach_the_store():
    ranks.run_ranks(_other_secret, 2, ranks.free_port(), timeout=DEADLINE_S)


def _wrong(r, port):
    import torch_lowcomm  # noqa: F401

    os.environ["LOWCOMM_LISTEN"] = f":{port + 1}"
    with pytest.raises(ValueError, match="LOWCOMM_LISTEN"):
        dist.init_process_group("lowcomm", init_method=f"lowcomm://127.0.0.1:{port}", rank=0, world_size=2)
    with pytest.raises(ValueError, match="port: expected a number"):
        dist.init_process_group("lowcomm", init_method="lowcomm://127.0.0.1", rank=0, world_size=2)
    os.environ["LOWCOMM_LISTEN"] = ":0"
    with pytest.raises(dist.DistNetworkError, match=f"expected a store at 127.0.0.1:{port} within 300 ms"):
        dist.init_process_group(
            "lowcomm",
            init_method=f"lowcomm://127.0.0.1:{port}",
            rank=1,
            world_size=2,
            timeout=timedelta(milliseconds=300),
        )


def test_what_is_wrong_is_named():
    ranks.run_ranks(_wrong, 1, ranks.free_port(), timeout=DEADLINE_S)
