"""The counts of `lc.stats()`: calls, bytes and seconds by group and op; its bytes are those of the network interface."""

import ctypes
import fcntl
import os
import pathlib
import socket
import struct
import time

import pytest
import ranks
import torch
import torch.distributed as dist


def _statistics(r):
    import torch_lowcomm as lc

    spec = "minmax8:bucket=1024"
    options = {"min_bytes": 0, "transport": "gloo"}  # which serves the all_reduce
    r.init("lowcomm", pg_options=lc.Options(policy=f"all_gather={spec}; reduce_scatter={spec}", **options))
    name = dist.group.WORLD.group_name
    n = 1 << 18
    others = r.size - 1
    for _ in range(3):
        dist.all_gather_into_tensor(torch.empty(n * r.size), torch.randn(n))
    for _ in range(2):
        dist.reduce_scatter_tensor(torch.empty(n), torch.randn(n * r.size))
    dist.all_reduce(torch.ones(10))
    stats = lc.stats()
    assert set(stats) == {name}
    assert {"all_gather", "reduce_scatter"} <= set(stats[name])
    for op, calls in (("all_gather", 3), ("reduce_scatter", 2)):
        s = stats[name][op]
        assert s["calls"] == calls, s
        assert s["exact_calls"] == 0, s
        assert s["raw_bytes"] == calls * others * n * 4, s
        payload = calls * others * lc.codec(spec).encoded_bytes(n)
        assert payload < s["wire_bytes"] < 1.01 * payload, (payload, s)
        assert s["ratio"] == pytest.approx(s["raw_bytes"] / s["wire_bytes"])
        assert 3.9 < s["ratio"] < 4, s
        assert s["encode_s"] > 0, s
        assert s["wait_s"] > 0, s
        assert s["decode_s"] > 0, s
        assert set(s["wait_by_peer"]) == set(range(r.size)) - {r.rank}, s
        assert sum(s["wait_by_peer"].values()) == pytest.approx(s["wait_s"])
        assert s["straggler"] == max(s["wait_by_peer"], key=s["wait_by_peer"].get), s
        x = torch.randn(n)
        whole = ((lc.codec(spec).roundtrip(x) - x).norm() / x.norm()).item()
        assert s["relative_error"] == pytest.approx(whole, rel=0.2), s
    assert stats[name]["all_reduce"]["wait_by_peer"] == {}, "the inner backend's"
    assert stats[name]["all_reduce"]["straggler"] is None
    assert stats[name]["all_reduce"]["relative_error"] is None
    lc.reset_stats()
    with lc.exact():
        dist.reduce_scatter_tensor(torch.empty(n), torch.randn(n * r.size))
        dist.all_gather_into_tensor(torch.empty(n * r.size), torch.randn(n))
    stats = lc.stats(dist.group.WORLD)[name]
    for op in ("all_gather", "reduce_scatter"):
        s = stats[op]
        assert (s["calls"], s["exact_calls"]) == (1, 1), s
        assert 4 * n * others <= s["wire_bytes"] < 1.01 * 4 * n * others, f"{op} moves (W-1)/W of the whole: {s}"
        assert s["encode_s"] + s["decode_s"] + s["wait_s"] > 0, s
        assert s["relative_error"] is None, "nothing was coded"
    # Another group counts by itself, and leaves with it.
    other = dist.new_group()
    dist.all_gather_into_tensor(torch.empty(3 * r.size), torch.ones(3), group=other)
    assert lc.stats()[other.group_name]["all_gather"]["calls"] == 1
    dist.destroy_process_group(other)
    assert name in lc.stats()


def test_statistics(pair, quad):
    pair(_statistics)
    quad(_statistics)


def _until_it_waits_for(rank):
    """Until the op under way has all but one rank's frames, by the flight record."""
    import torch_lowcomm as lc

    end = time.monotonic() + 30
    while True:
        op = lc.flight_record()[dist.group.WORLD.group_name]["ops"][-1]
        if op["wait"] and op["wait"]["rank"] == rank:
            return
        assert time.monotonic() < end, op
        time.sleep(0.001)


def _straggler(r, slow):
    """The rank that comes late is the one that all others waited for; that of messages is their peer."""
    import torch_lowcomm as lc

    r.init("lowcomm", pg_options=lc.Options(policy="p2p=sym4; all_reduce=sym4", min_bytes=0))
    name = dist.group.WORLD.group_name
    x = torch.randn(100000)
    for turn in range(2):
        dist.barrier()
        work = None if r.rank == slow else dist.all_reduce(x.clone(), async_op=True)
        if r.rank == slow:
            begun = time.monotonic()
            for other in set(range(r.size)) - {slow}:
                r.hear(f"rank {other} waits {turn}")
            time.sleep(0.1 + 2 * (time.monotonic() - begun))  # longer than the others waited for each other
            dist.all_reduce(x.clone())
        else:
            _until_it_waits_for(slow)
            r.say(f"rank {r.rank} waits {turn}")
            work.wait()
    stats = lc.stats()[name]["all_reduce"]
    if r.rank != slow:
        assert stats["straggler"] == slow, stats
    if r.rank < 2:
        works = [dist.irecv(torch.empty(100000), 1 - r.rank), dist.isend(x, 1 - r.rank)]
        for work in works:
            work.wait()
        stats = lc.stats()[name]
        assert stats["send"]["relative_error"] == pytest.approx(0.13, rel=0.3), "4 bits of a normal distribution"
        assert stats["recv"]["relative_error"] is None
        assert stats["recv"]["straggler"] == 1 - r.rank
        assert stats["recv"]["wait_by_peer"][1 - r.rank] == stats["recv"]["wait_s"] > 0
    dist.barrier()


def test_straggler(quad):
    quad(_straggler, 2)


def _own_loopback(r):
    """A network namespace for these ranks alone, where the system allows one: nobody else's traffic is counted."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newnet, siocsifflags, iff_up = 0x40000000, 0x8914, 1
    if r.rank == 0:
        alone = libc.unshare(clone_newnet) == 0
        if alone:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                fcntl.ioctl(s, siocsifflags, struct.pack("16sH22x", b"lo", iff_up))
        r.say("namespace", os.getpid() if alone else "")
        r.hear("joined")
        return alone
    pid = r.hear("namespace")
    if pid:
        r.enter(f"/proc/{pid}/ns/net")
    r.say("joined")
    return bool(pid)


def _sent_on_loopback():
    lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()  # this namespace's, unlike /sys
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def _on_the_wire(r, op, policy):
    """(interface bytes, counted bytes of both ranks) of one stretch, what loopback does by itself subtracted."""
    import torch_lowcomm as lc

    alone = _own_loopback(r)
    r.init("lowcomm", pg_options=lc.Options(policy=policy, min_bytes=0))
    n = 1 << 20  # 1 MiB of codes at 8 bits
    whole = torch.randn(n * r.size)
    out = torch.empty(n * r.size)
    results = []
    for _ in range(3 if alone else 12):
        dist.barrier()
        time.sleep(0.05)  # what the barrier still says is not idle
        start = _sent_on_loopback()
        time.sleep(0.1)
        idle = _sent_on_loopback() - start
        dist.barrier()
        lc.reset_stats()
        start, begun = _sent_on_loopback(), time.monotonic()
        for _ in range(8):
            if op == "all_gather":
                dist.all_gather_into_tensor(out, whole[:n])
            else:
                dist.reduce_scatter_tensor(out[:n], whole)
        r.say(f"done{len(results)}.{r.rank}")
        for q in range(r.size):
            r.hear(f"done{len(results)}.{q}")
        sent = _sent_on_loopback() - start - idle * (time.monotonic() - begun) / 0.1
        counted = torch.tensor([lc.stats()[dist.group.WORLD.group_name][op]["wire_bytes"]])
        dist.all_reduce(counted)
        results.append((sent, counted.item()))
    return alone, [sent / counted - 1 for sent, counted in results]


@pytest.mark.later
@pytest.mark.parametrize("policy", ["", "all_gather=minmax8; reduce_scatter=qsgd8"], ids=["exact", "compressed"])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_wire_bytes_are_the_interfaces(op, policy):
    alone, excess = ranks.run_ranks(_on_the_wire, 2, op, policy, timeout=90)[0]
    # A busy machine acknowledges smaller pieces, and on a shared loopback others' traffic counts too: a quiet stretch must
    # show it.
    assert any(-0.0005 < e < 0.01 for e in excess), f"interface over counter - 1: {excess}"
    assert not alone or all(-0.0005 < e < 0.02 for e in excess), f"interface over counter - 1: {excess}"
