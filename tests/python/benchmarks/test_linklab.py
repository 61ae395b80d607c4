"""The slow-link lab (benchmarks/linklab): links are what they say, lowcomm is right on them, nothing is left behind."""

import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import time

import pytest
from linklab import Lab, LabError, LabUnavailable, cli, link, namespaces, tools, validate
from links import BENCHMARKS, ENV, expect_labs
from ranks.starters import TESTS

RANK = TESTS / "linklab_rank.py"


@pytest.fixture
def may_make_labs():
    expect_labs()


@pytest.fixture(scope="module")
def lab():
    expect_labs()
    with Lab(hosts=2, rate="100mbit") as made:
        yield made


def until(condition, what, deadline_s=30):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 100e6), ("1gbit", 1e9), ("2.5Mbit", 2.5e6), ("64kbit", 64e3), ("64000bit", 64e3), ("unshaped", None)],
)
def test_rates(text, bits):
    assert link.parse_bits(text) == bits
    assert link.parse_rate(text) == (bits, bits)
    assert link.parse_bits(link.rate_text(bits)) == bits


def test_links():
    assert link.parse_rate("10mbit/20mbit") == (10e6, 20e6)
    assert link.parse_rate("10mbit/unshaped") == (10e6, None)
    assert [link.parse_delay(text) for text in ("20ms", "150us", "1.5s")] == pytest.approx([0.02, 150e-6, 1.5])
    assert link.parse_loss("0.1%") == pytest.approx(0.001)
    lab = Lab(hosts=3, rate="100mbit", rate_of={1: "10mbit/20mbit"}, delay="20ms", loss="0.1%")
    assert [str(one) for one in lab.links] == [
        "100mbit delay 20ms loss 0.1%",
        "10mbit/20mbit delay 20ms loss 0.1%",
        "100mbit delay 20ms loss 0.1%",
    ]
    assert validate.path_bits(lab.links[0], lab.links[1]) == 20e6
    assert validate.path_bits(lab.links[1], lab.links[0]) == 10e6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rate": "100"}, "expected a number and kbit, mbit or gbit, or unshaped; got '100'"),
        ({"rate": "10mbit/"}, "got ''"),
        ({"rate": "20gbit"}, "expected 64 kbit/s to 10 Gbit/s, got 2e+10"),
        ({"hosts": 1}, "hosts: expected 2 to 8, got 1"),
        ({"hosts": 9}, "hosts: expected 2 to 8, got 9"),
        ({"rate_of": {2: "1mbit"}}, "rate_of: expected hosts 0 to 1, got [2]"),
        ({"delay": "20"}, "delay: expected a number and us, ms or s; got '20'"),
        ({"delay": "11s"}, "delay: expected 0 to 10 s, got 11 s"),
        ({"loss": "0.1"}, "loss: expected a percentage such as 0.1%, got '0.1'"),
        ({"burst": 1000}, "burst: expected 1514 bytes (a frame) or more, got 1000"),
        ({"loss": "100%"}, "expected 0 to under 100 %, got 100"),
    ],
)
def test_wrong_links_are_refused_before_anything_is_made(arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Lab(**arguments)


def test_ideal_time_is_of_the_bytes_that_the_headers_leave():
    assert link.burst_bytes(10e6) == link.burst_bytes(100e6) == 16 << 10
    assert link.burst_bytes(1e9) == 128 << 10
    payload = (16 << 10) + 12_500_000 * 1448 / 1514  # a second of 100 Mbit/s, and what the bucket gives
    assert link.ideal_s(payload, 100e6) == pytest.approx(1)
    assert link.ideal_s(100, 100e6) == 0


def test_command_line(capsys):
    line = ["run", "--hosts", "3", "--rate-of", "1=10mbit/20mbit", "--rate-of", "2=unshaped", "--loss", "1%", "--"]
    args = cli.parser().parse_args([*line, "python", "-c", "pass", "--hosts"])
    assert args.program == ["python", "-c", "pass", "--hosts"]
    assert (args.hosts, dict(args.rate_of), args.loss) == (3, {1: "10mbit/20mbit", 2: "unshaped"}, "1%")
    for wrong in (["run", "--rate-of", "10mbit", "true"], ["run"], []):
        with pytest.raises(SystemExit) as ended:
            cli.parser().parse_args(wrong)
        assert ended.value.code == 2
    assert "expected HOST=RATE" in capsys.readouterr().err


def test_without_rights_it_says_so_in_a_sentence():
    # Imports first: another user may not be able to read this tree.
    as_nobody = (
        f"import os, sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import linklab.cli as cli; "
        "os.getuid() or os.setuid(65534); sys.exit(cli.main(['run', '--', 'true']))"
    )
    done = subprocess.run([sys.executable, "-c", as_nobody], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (cli.EXIT_UNAVAILABLE, ""), done
    assert done.stderr.startswith("linklab: a lab needs "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_without_tools_it_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(tools, "_ADMINISTRATORS", "")
    with pytest.raises(LabUnavailable, match="a lab needs the tool ip "):
        Lab().__enter__()


def shaped(row):
    """Never faster than its link; how much slower is the machine's business (`validate` itself allows 3 %)."""
    return 0.2 * row.expected < row.measured < 1.03 * row.expected


@pytest.mark.later
def test_the_lab_is_what_it_says(lab):
    rows = validate.validate(lab, tries=2)
    assert [(row.what, row.way) for row in rows] == [("goodput", "1 to 0"), ("goodput", "0 to 1")]
    assert shaped(rows[0]) and shaped(rows[1]), validate.table(rows)


def test_torchruns_environment(lab):
    command = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    for host, ended in enumerate(lab.run(command, timeout_s=30, env={"MINE": "1"})):
        said = json.loads(ended.output)
        expected = {"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.77.0.1", "MINE": "1"}
        expected |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_PORT": "29500"}
        assert {key: said[key] for key in expected} == expected


@pytest.mark.later
def test_lowcomm_is_right_and_counts_what_passes_the_interface(lab, tmp_path):
    before = [lab.bytes(host) for host in range(2)]
    ended = lab.run([sys.executable, str(RANK), "collectives", str(tmp_path / "rank")], timeout_s=120, env=ENV)
    assert [rank.code for rank in ended] == [0, 0], "\n".join(rank.output for rank in ended)
    counted = [0, 0]
    for rank in range(2):
        for op, both in json.loads((tmp_path / f"rank{rank}").read_text()).items():
            # Ethernet, IP and TCP headers are 4.6 % of a full segment, acknowledgements of what comes the other way 2 %.
            assert both["counted"] <= both["interface"] <= 1.10 * both["counted"] + 10_000, (rank, op, both)
            counted[rank] += both["counted"]
    # An eighth of 4 bytes, and scales.
    coded, exact = (
        json.loads((tmp_path / "rank0").read_text())[f"all_gather{s}"]["counted"] for s in (" sym4:bucket=1024", "")
    )
    assert 7.8 < exact / coded < 8, (exact, coded)
    for host in range(2):
        now = lab.bytes(host)
        assert now.sent - before[host].sent >= counted[host]
        assert now.received - before[host].received >= counted[1 - host]


@pytest.mark.later
def test_a_cut_stops_every_byte_and_after_it_nothing_is_lost(lab, tmp_path):
    start = lab.bytes(0).received
    job = lab.start([sys.executable, str(RANK), "long", str(tmp_path / "rank")], env=ENV)
    try:
        until(lambda: lab.bytes(0).received > start + (4 << 20) or not job.running(), "4 MiB across", 60)
        assert job.running() == [0, 1], "\n".join(job.output(rank) for rank in range(2))
        lab.cut(1)
        time.sleep(0.5)  # what the queues held has arrived
        held = [lab.bytes(host).received for host in range(2)]
        time.sleep(1)
        passed = [lab.bytes(host).received - before for host, before in enumerate(held)]
        # The switch's kernel may send a frame of its own (a router solicitation has 70 bytes); a segment has 1,000 and more.
        assert max(passed) < 256, f"bytes passed a link that was cut: {passed}"
        assert job.running() == [0, 1]
    finally:
        lab.restore(1)
    ended = job.wait(120)
    assert [rank.code for rank in ended] == [0, 0], "\n".join(rank.output for rank in ended)
    assert [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)] == [4, 4]


def test_ranks_that_fail_or_stay_are_ended(lab):
    one, other = lab.run(["sh", "-c", "echo from $RANK; exit $((RANK * 3))"], timeout_s=30)
    assert (one.code, one.output, other.code, other.output) == (0, "from 0\n", 3, "from 1\n")
    with pytest.raises(LabError, match=r"ranks \[0, 1\] did not\n---- rank 0\nhere"):
        lab.run(["sh", "-c", "echo here; sleep 1000"], timeout_s=5)
    job = lab.start_on(1, ["sleep", "1000"])
    job.kill()
    assert [rank.code for rank in job.wait(10)] == [-signal.SIGTERM]
    with pytest.raises(ValueError, match="host: expected 0 to 1, got 2"):
        lab.cut(2)


@pytest.mark.later
def test_single_rates_both_ways_and_delay(may_make_labs):
    with Lab(hosts=2, rate="20mbit", rate_of={1: "10mbit/5mbit"}, delay="5ms") as lab:
        rows = validate.validate(lab, tries=2, only={"goodput", "round trip"})
        drops = lab.forwarder_drops()
    up, down, trip = rows
    assert shaped(up) and shaped(down), validate.table(rows)
    assert (up.expected, down.expected) == (link.goodput_bits(10e6), link.goodput_bits(5e6))
    assert trip.measured >= trip.expected == 0.01, "never earlier; how much later is the machine's business"
    assert drops == 0


@pytest.mark.later
def test_a_smaller_burst_and_another_congestion_control(may_make_labs):
    with Lab(hosts=2, rate="10mbit", burst=4096, congestion="reno") as lab:
        for host in range(2):
            assert "congctl reno" in tools.ip("route", "show", "10.77.0.0/24", inside=lab.namespace(host))
            assert re.search(
                r"rate 10Mbit burst 4Kb", tools.tc("qdisc", "show", "dev", "eth0", inside=lab.namespace(host))
            )
        assert all(row.measured > 0 for row in validate.validate(lab, tries=1, only={"goodput"}))


def _dial(lab, host, address):
    """How a dial to a port that nobody listens on ends: "refused" by the host, or "silence"."""
    code = (
        "import socket\n"
        f"try: socket.create_connection(({address!r}, 9), timeout=1)\n"
        "except ConnectionRefusedError: print('refused')\n"
        "except OSError: print('silence')"
    )
    (ended,) = lab.start_on(host, [sys.executable, "-c", code]).wait(30)
    return ended.output.strip()


def test_a_host_behind_a_router_dials_and_is_not_dialled(may_make_labs):
    expect_labs("nft")
    with Lab(hosts=3, rate="10mbit", behind_router={0}) as lab:
        assert [_dial(lab, *way) for way in ((0, "10.77.0.2"), (1, "10.77.0.3"))] == ["refused"] * 2
        assert [_dial(lab, 1, address) for address in ("10.77.0.1", "192.168.1.2")] == ["silence"] * 2
        lab.move(0, "10.77.0.101")
        assert _dial(lab, 0, "10.77.0.2") == "refused"
        lab.move(1, "10.77.0.102")
        assert _dial(lab, 2, "10.77.0.102") == "refused"
        assert _dial(lab, 2, "10.77.0.2") == "silence"
    with pytest.raises(ValueError, match=r"behind_router: expected hosts 0 to 1, got \[2\]"):
        Lab(hosts=2, behind_router={2})


def test_frames_are_lost_at_the_rate_that_was_asked_for(may_make_labs):
    with Lab(rate="10mbit", loss="2%") as lab:
        validate.validate(lab, tries=1, only={"goodput"})
        frames = lab._forwarder.counts()
    sent = (
        frames["lost"] + frames["forwarded"] / 2
    )  # a frame that is not lost passes its sender's wire and its receiver's
    share, deviation = frames["lost"] / sent, math.sqrt(0.02 * 0.98 / sent)
    assert frames["lost"] > 0 and abs(share - 0.02) < 5 * deviation, frames


@contextlib.contextmanager
def labs_process():
    """A lab of another process, up, with ranks that have a child each; (process, names of its namespaces)."""
    command = [sys.executable, str(BENCHMARKS), "linklab", "run", "--", "sh", "-c", "sleep 1000 & wait"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # Where the tests run in a shell's background Ctrl-C is ignored, and what they start would ignore it too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    mine = f"linklab-{process.pid}-"

    def up():
        hosts = [name for name in namespaces.existing(mine) if not name.endswith("wire")]
        return len(hosts) == 2 and all(len(inside(name)) == 2 for name in hosts)

    try:
        until(lambda: up() or process.poll() is not None, "two ranks with a child each")
        assert process.poll() is None, f"it ended with {process.returncode}"
        yield process, namespaces.existing(mine)
    finally:
        process.terminate()
        process.wait(30)


def inside(namespace):
    try:
        return tools.ip("netns", "pids", namespace).split()
    except LabError:
        return []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_lab_that_is_told_to_end_leaves_nothing(may_make_labs, number, code):
    with labs_process() as (process, names):
        process.send_signal(number)
        assert process.wait(30) == code
        assert not set(names) & set(namespaces.existing())


def test_what_a_killed_lab_left_goes_with_the_next(may_make_labs):
    with labs_process() as (process, names), labs_process() as (_, others):
        process.kill()
        process.wait(30)
        assert set(names) <= set(namespaces.existing()), "nobody was there to remove them"
        pids = [int(pid) for name in names for pid in inside(name)]
        assert pids, "the ranks' children are still there"
        with Lab():
            assert not set(names) & set(namespaces.existing())
            assert set(others) <= set(namespaces.existing()), "a living lab is left alone"
        assert not [pid for pid in pids if namespaces.started(pid) is not None], "a process outlived its lab"


def test_an_error_inside_removes_the_lab(may_make_labs):
    with pytest.raises(ZeroDivisionError):
        with Lab(rate="10mbit") as lab:
            names = [lab.switch, lab.namespace(0), lab.namespace(1)]
            assert set(names) <= set(namespaces.existing())
            raise ZeroDivisionError
    assert not set(names) & set(namespaces.existing())


def test_what_is_measured_is_judged():
    """Rows of the standard set become gates."""
    from linklab import ops_on_links, standard, targets

    rank = {"op": "all_gather", "counted_bytes": 1 << 20, "needed_bytes": 1 << 20, "interface_bytes": [1 << 20] * 3}
    rank |= {"elements": 1 << 18, "relative_error": 0.0, "good": True, "crc": 7, "cpu_s": [0.5] * 3}
    rank |= {"retransmitted": None, "congestion": None}
    rows = []
    for group, seconds in (("gloo fp32", 1.0), ("lowcomm exact", 0.5), ("lowcomm sym4", 0.1), ("raw exchange", 0.09)):
        rows.append(rank | {"group": group, "times": [(0.0, seconds), (5.0, 5 + seconds), (9.0, 9 + seconds)]})
    other = [row | {"times": [(a + 0.01, b + 0.01) for a, b in row["times"]]} for row in rows]
    other[2] = other[2] | {"crc": 8}
    joined = ops_on_links.joined("100mbit", standard.SETS["100mbit"], [rows, other])
    assert [row["median_s"] for row in joined] == pytest.approx([1.01, 0.51, 0.11, 0.1])
    assert joined[2]["times_gloo"] == pytest.approx(1.01 / 0.11)
    assert joined[2]["of_ideal"] == pytest.approx(link.ideal_s(1 << 20, 100e6) / 0.11)
    assert joined[2]["of_raw"] == pytest.approx(0.1 / 0.11)
    assert joined[2]["cpu_s_a_gb"] == pytest.approx(1 / (2 * (1 << 20) / 1e9))
    assert [row["wrong"] for row in joined] == [0, 0, 1, 0], "ranks that differ are found"
    gates = {gate.name: gate.passed for gate in targets.gates(joined)}
    assert gates["100mbit all_gather lowcomm sym4: share of the ideal"] is False
    assert gates["100mbit all_gather lowcomm exact: times gloo"] is True
    assert gates["results that are not what they must be, all rows and ranks"] is False
    assert "lowcomm sym4" in ops_on_links.line(joined[2])
