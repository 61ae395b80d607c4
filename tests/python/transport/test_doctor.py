"""`python -m torch_lowcomm doctor`: what it says of hosts with two interfaces, of hosts that are cut off, and of none."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from linklab import Lab, tools
from links import ENV, add_interfaces, expect_labs

from torch_lowcomm.cli.doctor import advice
from torch_lowcomm.cli.link import measure
from torch_lowcomm.cli.sockets import Connection, Listener
from torch_lowcomm.planner import Link

DOCTOR = [sys.executable, "-m", "torch_lowcomm", "doctor"]


def row(a, b, by, rate=None):
    """A row: without a rate the address does not answer, with 0 it does and was not measured."""
    rates = [rate, 2 * rate] if rate else []
    return {"from": a, "to": b, "by": by, "reached": rate is not None, "rates": rates}


def about(chosen=""):
    return {"name": "it", "chosen": chosen, "restarts": False}


@pytest.mark.parametrize(
    ("rows", "chosen", "said"),
    [
        ([row(0, 1, "a", 90), row(1, 0, "a", 95)], "", []),
        ([row(0, 1, "a", 90), row(0, 1, "b", 100), row(1, 0, "a", 95)], "", []),
        ([row(0, 1, "a", 90), row(0, 1, "b", 900), row(1, 0, "a", 95)], "", []),
        ([row(0, 1, "a", 90), row(0, 1, "b", 900), row(1, 0, "a", 95)], "b", []),
        (
            [row(0, 1, "a", 900), row(0, 1, "b", 90), row(1, 0, "a", 95)],
            "b",
            ["LOWCOMM_SOCKET_IFNAME=a there: 900 Mbit/s, b"],
        ),
        ([row(0, 1, "a", 90), row(0, 1, "b", 0), row(1, 0, "a", 95)], "b", []),
        ([row(0, 1, "a", 90), row(0, 1, "b"), row(1, 0, "a", 95)], "b", ["b, which LOWCOMM_SOCKET_IFNAME or"]),
        ([row(0, 1, "a"), row(0, 1, "b", 90), row(1, 0, "a", 95)], "", []),
        ([row(0, 1, "a"), row(1, 0, "a", 95)], "", ["no rank reaches it; LOWCOMM_DIAL_ONLY=1 there"]),
        ([row(0, 1, "advertised", 90), row(0, 1, "a"), row(1, 0, "a", 95)], "", []),
        ([row(0, 1, "a"), row(1, 0, "a")], "", ["reach each other at no address: open a port"]),
    ],
)
def test_advice(rows, chosen, said):
    found = advice(rows, {0: about(), 1: about(chosen)})
    assert len(found) == len(said), found
    assert all(words in sentence for words, sentence in zip(said, found, strict=True)), found


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        (dict.fromkeys(ALONE), 2, "a launcher such as torchrun sets RANK"),
        ({"MASTER_ADDR": None}, 2, "environment variable MASTER_ADDR expected"),
        ({}, 0, "all ranks are on one host: it dials nothing"),
        ({"LOWCOMM_LISTEN": "29600"}, 1, "LOWCOMM_LISTEN: expected host:port or :port, got '29600'"),
        ({"LOWCOMM_ADVERTISE": "host"}, 1, "LOWCOMM_ADVERTISE: expected host:port, got 'host'"),
    ],
)
def test_variables(changes, status, said):
    environment = os.environ | ENV | ALONE | changes
    environment = {name: value for name, value in environment.items() if value is not None}
    ended = subprocess.run(DOCTOR, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, said in ended.stdout + ended.stderr) == (status, True), ended
    assert "Traceback" not in ended.stderr


def test_a_connection_is_measured_by_both_ends():
    with Listener(1, 0, 60) as listener, ThreadPoolExecutor(1) as pool:
        followed = pool.submit(lambda: measure(listener.accept(0), 0.3, leads=False))
        with Connection.to(("127.0.0.1", listener.port, listener.token), 0, 1, 60) as link:
            found = [measure(link, 0.3, leads=True), followed.result()]
    assert len(found[0]["rtt_us"]) == 20 and min(found[0]["rtt_us"]) > 0
    assert all(end[how] > 0 for end in found for how in ("alone", "both"))


def examined(lab, *options, **environment):
    """Runs it on both hosts; returns the exit statuses, the words of each row, and rank 0's lines."""
    job = lab.start([*DOCTOR, "--seconds", "0.8", *options], env=ENV | environment)
    ended = job.wait(100)
    lines = job.output(0).splitlines()
    return [one.code for one in ended], [line.split() for line in lines if line[:5].strip().isdigit()], lines


@pytest.mark.later
def test_hosts_with_two_interfaces(tmp_path):
    """The second pair of interfaces is not shaped; then it loses its route. A plan reads the faster one."""
    expect_labs()
    with Lab(hosts=2, rate="20mbit") as lab:
        spaces = add_interfaces(lab, "fast")
        codes, rows, lines = examined(lab, "--json", str(tmp_path / "link.json"), GLOO_SOCKET_IFNAME="")
        assert codes == [0, 0], lines
        link = Link.measured(tmp_path / "link.json")
        assert (link.sites, link.ranks_per_site) == (2, 1) and link.rate > 100e6 / 8 and link.round_trip_s > 0
        of = {(one[0], one[2]): float(one[5]) for one in rows}
        assert len(rows) == 4 and {by for _, by in of} == {"fast", "eth0"}, lines
        assert 10 < of["0", "eth0"] < 20 and of["0", "fast"] > 100, lines
        assert not any("LOWCOMM_" in line for line in lines), lines  # groups take the faster one
        assert lines[-1].startswith("# at ") and "an all_reduce of 100 MB" in lines[-1], lines
        (restarting,) = [line for line in lines if "tcp_slow_start_after_idle=0" in line]
        assert "rank 0 (" in restarting and "rank 1 (" in restarting
        for space in spaces:
            keep = "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle"
            tools.call(["ip", "netns", "exec", space, "sh", "-c", keep])
        assert "# nothing has to be set" in examined(lab, GLOO_SOCKET_IFNAME="")[2]

        codes, rows, lines = examined(lab)
        advised = [line for line in lines if "LOWCOMM_SOCKET_IFNAME=fast" in line]
        assert len(advised) == 2 and "rank 0 (" in advised[0] and socket.gethostname() in advised[0], lines

        tools.ip("address", "del", "10.99.0.1/24", "dev", "fast", inside=spaces[0])
        codes, rows, lines = examined(lab)
        assert codes == [0, 0], lines
        assert [one[:3] for one in rows if not one[4][0].isdigit()] == [["0", "1", "fast"]], lines
        assert not any("reach each other" in line or "DIAL_ONLY" in line for line in lines), lines


@pytest.mark.later
def test_hosts_that_do_not_reach_each_other():
    """The store's port is open and no other: both are told, and LOWCOMM_LISTEN's port is the one that is tried."""
    expect_labs("nft")
    with Lab(hosts=2, rate="unshaped") as lab:
        port = lab.environment(0)["MASTER_PORT"]
        rules = f"""table inet t {{
            chain c {{
                type filter hook input priority 0;
                iif lo accept
                tcp dport {{ {port}, 29600 }} accept
                tcp sport {{ {port}, 29600 }} accept
                meta l4proto tcp drop
            }}
        }}"""
        for host in (0, 1):
            tools.nft(rules, inside=lab.namespace(host))
        codes, _, lines = examined(lab)
        assert codes == [1, 1] and any("reach each other at no address" in line for line in lines), lines
        codes, _, lines = examined(lab, LOWCOMM_LISTEN=":29600")
        assert codes == [0, 0] and not any("LOWCOMM_" in line for line in lines), lines
