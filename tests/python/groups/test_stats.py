"""The counts of `lc.stats()`: calls, bytes and seconds by group and op; its bytes are those of the network interface."""

import ctypes
import os
import pathlib
import subprocess
import time

import pytest
import ranks
import torch
import torch.distributed as dist

import torch_lowcomm as lc


@pytest.mark.on("pair", "quad")
def test_statistics(r):
    spec = "minmax8:bucket=1024"
    r.init("lowcomm", pg_options=lc.Options(policy=f"all_gather={spec}; reduce_scatter={spec}", min_bytes=0))
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
    s = stats[name]["all_reduce"]
    assert (s["calls"], s["exact_calls"], s["relative_error"]) == (1, 1, None), s
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


def _sent_on_loopback():
    lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()  # this namespace's, unlike /sys
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def _on_the_wire(r):
    """Interface bytes / counted bytes of both ranks - 1, by stretch, in a network namespace with no other traffic."""
    if r.rank == 0:
        assert ctypes.CDLL(None).unshare(0x40000000) == 0  # CLONE_NEWNET
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        r.say("namespace", os.getpid())
    else:
        r.enter(f"/proc/{r.hear('namespace')}/ns/net")
    r.init("lowcomm", pg_options=lc.Options(policy="all_gather=minmax8", min_bytes=0))
    n = 1 << 20  # 1 MiB of codes at 8 bits
    mine, out, excess = torch.randn(n), torch.empty(n * r.size), []
    for stretch in range(3):
        dist.barrier()
        time.sleep(0.05)  # the barrier's last bytes belong to no stretch
        r.meet_at(f"quiet{stretch}")
        lc.reset_stats()
        start = _sent_on_loopback()
        r.meet_at(f"read{stretch}")
        for _ in range(8):
            dist.all_gather_into_tensor(out, mine)
        r.meet_at(f"done{stretch}")
        sent = _sent_on_loopback() - start
        counted = torch.tensor([lc.stats()[dist.group.WORLD.group_name]["all_gather"]["wire_bytes"]])
        r.meet_at(f"counted{stretch}")
        dist.all_reduce(counted)
        excess.append(sent / counted.item() - 1)
    return excess


@pytest.mark.later
def test_wire_bytes_are_the_interfaces():
    from links import expect_labs  # ranks import this file too, without the path of the labs

    expect_labs()
    excess = ranks.run_ranks(_on_the_wire, 2, timeout=90)[0]
    # A busy machine acknowledges smaller pieces: a quiet stretch must show it.
    assert any(-0.0005 < e < 0.01 for e in excess), f"interface over counter - 1: {excess}"
    assert all(-0.0005 < e < 0.02 for e in excess), f"interface over counter - 1: {excess}"
