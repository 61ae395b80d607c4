"""`init_method="lowcomm://host:port"`: a job of several processes meets and trains over rank 0's port alone."""

import os
import secrets
import signal
import struct
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from port_client import Stream
from test_tcp import SECRET, needs_tls

import torch_lowcomm as lc
from torch_lowcomm import _C

DEADLINE_S = 60.0
MIB = 1 << 20
# torch's own: csrc/distributed/c10d/TCPStoreBackend.hpp
VALIDATE, GET = b"\x00" + struct.pack("<I", 0x3C85F7CE), 3


@pytest.fixture
def port():
    """A port that no process listens on."""
    return ranks.free_port()


def _meet(r, port, seconds):
    dist.init_process_group(
        "lowcomm",
        init_method=f"lowcomm://127.0.0.1:{port}",
        rank=r.rank,
        world_size=r.size,
        timeout=timedelta(seconds=seconds),
    )


@pytest.mark.parametrize(
    ("by_environment", "secret"), [(False, ""), (True, ""), pytest.param(False, SECRET, marks=needs_tls)]
)
@pytest.mark.on(3, timeout=DEADLINE_S)
def test_three_ranks_meet_at_one_port(r, port, by_environment, secret):
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


@pytest.mark.later
@pytest.mark.on(2, timeout=DEADLINE_S)
def test_another_secret_does_not_reach_the_store(r, port):
    os.environ |= {"LOWCOMM_SECRET": secrets.token_urlsafe(32)}
    with pytest.raises((dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
        _meet(r, port, seconds=8)


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_long_values_and_longer_answers(r, port):
    """Values, and answers that are longer; some are asked for before they are there."""
    _meet(r, port, seconds=60)
    store = dist.distributed_c10d._get_default_store()
    names = ["a", "b", "c"]
    if r.rank == 0:
        store.set("waits", "1")
        for name in names:
            store.set(name, name * (8 << 20))
            store.append(name, "." * (5 << 20))
        for i in range(5):
            store.set(f"key {i}", f"value of key {i}")
    else:
        store.get("waits")
        assert all(len(value) >= 8 << 20 for value in store.multi_get(names))
        store.wait(["key 4"])
        assert [store.get(name) for name in names] == [name.encode() * (8 << 20) + b"." * (5 << 20) for name in names]
    with pytest.raises(ValueError, match="expected a value of at most 8388608 bytes, got 8388609"):
        store.set("long", "x" * ((8 << 20) + 1))
    with pytest.raises(ValueError, match="expected a value of at most"):
        store.multi_set(["short", "long"], ["x", "x" * (9 << 20)])
    store.wait(["key 4"])
    assert [store.get(f"key {i}").decode() for i in range(5)] == [f"value of key {i}" for i in range(5)]
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.on(2, timeout=DEADLINE_S, allow_exit={0: -signal.SIGKILL})
def test_a_store_whose_process_dies_is_an_error(r, port):
    if r.rank == 0:
        os.environ["LOWCOMM_LISTEN"] = f"127.0.0.1:{port}"
        store = _C.serve_store(timedelta(seconds=DEADLINE_S))
        store.get("come")
        os.kill(os.getpid(), signal.SIGKILL)
    store = _C.dial_store(f"127.0.0.1:{port}", timedelta(seconds=30))
    store.set("come", "1")
    with pytest.raises(dist.DistNetworkError):
        store.get("never")
    with pytest.raises(dist.DistNetworkError):
        store.add("never", 1)


@pytest.mark.on(1, timeout=DEADLINE_S)
def test_what_is_wrong_is_named(r, port):
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


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_answers_are_those_of_the_questions(r, port):
    """Rank 0 serves a store until rank 1 says that it is done."""
    if r.rank == 0:
        os.environ["LOWCOMM_LISTEN"] = f"127.0.0.1:{port}"
        store = _C.serve_store(timedelta(seconds=DEADLINE_S))
        store.set("hello", "world")
        store.get("done")
        return
    store = _C.dial_store(f"127.0.0.1:{port}", timedelta(seconds=60))
    _pipeline(port, store)
    assert store.get("hello") == b"world", "who was there is served"
    # Those who have hung up may not be found out yet.
    assert _C.dial_store(f"127.0.0.1:{port}", timedelta(seconds=60)).get("hello") == b"world", "and who comes later"
    store.set("done", "1")


def _pipeline(port, store):
    """Asks without waiting for answers, takes them late, and hangs up on others."""
    long = b"A" * (3 * MIB)
    for key in ("long", "longer"):
        store.set(key, long)
    for hangs_up in (True, False) * 3:
        stream = Stream(port)
        ask = b"".join(struct.pack("<BQ", GET, len(key)) + key for key in (b"/long", b"/hello", b"/longer"))
        stream.send(VALIDATE + ask)
        if hangs_up:
            stream.receive(100_000)
            stream.close()
            continue
        for i in range(3):  # what else comes to rank 0's memory meanwhile
            store.set(f"other {i}", b"SECRET--" * 300_000)
        for value in (long, b"world", long):
            assert stream.receive(8) == struct.pack("<Q", len(value))
            assert stream.receive(len(value)) == value
        stream.close()
