"""`python -m torch_lowcomm bench`: real ranks measure every op, the columns and the JSON, what is wrong, what is refused."""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import time

import pytest
import ranks
import torch
import torch.distributed as dist

from torch_lowcomm import cli
from torch_lowcomm.cli import bench
from torch_lowcomm.cli.bench import launch, measure, ops, plan

COLUMNS = ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
COLUMNS += ["min", "spread", "wire", "ratio", "rel.err", "encode", "decode", "ideal", "x peer"]
SMALL = ["-b", "4K", "-e", "64K", "-f", "16", "-n", "2", "-w", "1"]


def parsed(text):
    """The rows of a table, by column."""
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def arguments_of(argv):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([str(a) for a in argv])


def _run(r, commands):
    """Every command on this rank: (status, stdout)."""
    import torch_lowcomm as lc

    r.init("lowcomm", pg_options=lc.Options(""), timeout_s=60)
    done = []
    for argv in commands:
        arguments = arguments_of(argv)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = measure.run(bench.prepare(arguments))
        done.append((status, out.getvalue()))
    return done


EXACT = [
    ("all_reduce", "--peer", "gloo"),
    ("all_reduce", "-o", "avg", "-d", "bfloat16"),
    ("all_reduce", "-o", "max", "-d", "int32"),
    ("all_gather", "-d", "int8", "--peer", "gloo"),
    ("reduce_scatter", "-o", "prod", "-d", "double"),
    ("reduce_scatter", "-o", "avg", "-d", "half"),
    ("all_to_all", "-d", "uint8"),
    ("broadcast", "-r", "1", "--peer", "gloo"),
    ("sendrecv", "-d", "int64", "--peer", "gloo"),
]
CODED = [
    ("all_gather", "--codec", "minmax8", "--rate", "100M", "--peer", "gloo"),
    ("all_gather", "--codec", "gauss4", "-d", "bfloat16"),
    ("reduce_scatter", "--codec", "qsgd4:bucket=64"),
    ("reduce_scatter", "--codec", "sym4", "-o", "avg", "-d", "half"),
    ("all_reduce", "--codec", "sym4"),
    ("sendrecv", "--codec", "minmax4"),
]


@pytest.mark.later
@pytest.mark.parametrize("size", [2, 3])
def test_every_op(request, tmp_path, size):
    """Two ranks, and three, whose sums have an order."""
    pool = request.getfixturevalue({2: "pair", 3: "trio"}[size])
    cases = EXACT + CODED
    commands = [[case[0], *SMALL, *case[1:], "--json", tmp_path / f"{i}.json"] for i, case in enumerate(cases)]
    done = pool(_run, commands, timeout=120)
    for i, case in enumerate(cases):
        op = ops.OPERATIONS[case[0]]
        text = done[0][i][1]
        assert [answer[i][0] for answer in done] == [0] * size, (case, text)
        assert [answer[i][1] for answer in done[1:]] == [""] * (size - 1), "rank 0 alone prints"
        assert "# Out of bounds values : 0 OK" in text, (case, text)
        rows = parsed(text)
        stored = json.loads((tmp_path / f"{i}.json").read_text())
        check_stored(stored, case, size)
        parts = 1 if op.whole else size
        item = ops.DTYPES[rows[0]["type"]].itemsize
        assert [int(row["size"]) for row in rows] == [s // parts // item * parts * item for s in (4096, 65536)]
        for row, kept in zip(rows, stored["rows"], strict=True):
            assert int(row["size"]) == int(row["count"]) * parts * item
            check_row(row, kept, op, case, size)


def check_stored(stored, case, size):
    assert set(stored) == {"versions", "machine", "op", "options", "rows", "wrong"}
    assert stored["op"] == case[0]
    assert stored["wrong"] == 0
    assert stored["options"]["ranks"] == size
    assert set(stored["versions"]) == {"python", "torch", "torch_lowcomm"}


def check_row(row, got, op, case, size):
    coded = case in CODED
    share = op.rounds * (size - 1) / size or 1
    assert int(row["#wrong"]) == got["wrong"] == got["ranks_differ"] == 0
    assert len(got["times_us"]) == 2
    assert got["min_us"] == min(got["times_us"]) <= got["time_us"] <= max(got["times_us"])
    assert got["busbw_gb_s"] == pytest.approx(got["algbw_gb_s"] * share, rel=0.01)
    assert got["algbw_gb_s"] == pytest.approx(int(row["size"]) / got["time_us"] / 1e3)
    assert got["coded"] == coded
    if not coded:
        assert got["needed_bytes"] == pytest.approx(int(row["size"]) * share, rel=0.01)
    # The bytes that the op needs, and few more: a description and headers for a peer, and slices that are not all equal.
    most = got["needed_bytes"] * (size - 1 if op.rooted else 1) * 1.25 + 1024 * (size - 1)
    assert got["needed_bytes"] < got["wire_bytes"] < most
    assert 0 < got["relative_error"] < 0.5 if coded else got["relative_error"] < 1e-2
    assert (got["peer"] is not None) == (row["x peer"] != "N/A") == ("--peer" in case)
    if got["peer"]:
        assert got["peer"]["wrong"] == 0
        assert got["times_peer"] == pytest.approx(got["peer"]["time_us"] / got["time_us"])
        assert got["peer"]["needed_bytes"] >= got["needed_bytes"]
    if "--rate" in case:
        ideal = got["needed_bytes"] * 8 / (100e6 * 1448 / 1514)
        assert got["ideal_us"] == pytest.approx(ideal * 1e6)
        assert got["share_of_ideal"] == pytest.approx(got["ideal_us"] / got["time_us"])
    assert (row["ideal"] != "N/A") == ("--rate" in case)
    assert coded <= (float(row["ratio"]) > 1.5)


def _spoilt(r, argv, spoil):
    """A run in which the last rank's result is changed after every call."""
    call = ops.Case.call

    def changed(case, group):
        call(case, group)
        if r.rank == r.size - 1:
            spoil(case.result)

    ops.Case.call = changed
    try:
        return _run(r, [argv])[0]
    finally:
        ops.Case.call = call


def _lost(result):
    result[:1000] = 0


def _nan(result):
    result[-1] = float("nan")


def _last_bit(result):
    result.view(torch.int32)[3] ^= 1


@pytest.mark.parametrize(
    ("argv", "spoil", "wrong"),
    [
        (["all_reduce"], _last_bit, 1),  # a rank that differs from rank 0, by no more than roundings do
        (["all_reduce"], _lost, 1001),
        (["all_gather", "--codec", "minmax8"], _lost, 16385),
        (["reduce_scatter", "--codec", "sym4"], _nan, 8192),
        (["sendrecv"], _last_bit, 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_result_is_counted(pair, argv, spoil, wrong):
    for status, text in pair(_spoilt, [*argv, "-b", "64K", "-e", "64K", "-n", "1"], spoil):
        assert status == 1
        if text:
            (row,) = parsed(text)
            assert int(row["#wrong"]) == wrong, text
            assert "FAILED" in text


def test_sizes_go_by_a_factor():
    given = bench.prepare(arguments_of(["all_reduce", "-b", "64K", "-e", "1M", "-f", "3"]))
    assert given.sizes == [65536, 196608, 589824]


def test_letters_are_powers_of_1024_and_1000():
    assert [plan.number(t, 1024) for t in ("8", "64K", "1.5M", "1g")] == [8, 2**16, 3 * 2**19, 2**30]
    assert [plan.number(t, 1000) for t in ("100M", "1Gbit", "2.5gbit/s", "9600")] == [1e8, 1e9, 2.5e9, 9600]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("all_reduce -b 2M -e 1M", "expected -b no larger than -e, got 2097152 and 1048576 bytes"),
        ("all_reduce -f 1", "--stepfactor: expected at least 2, got 1"),
        ("all_gather --codec zip9", "zip9"),
        ("all_gather --codec levels4", "expected a codec that needs no level table"),
        ("all_reduce -o avg -d int8", "-o avg: expected a floating type, got int8"),
        ("all_reduce --ranks 0", "--ranks: expected at least 2, got 0"),
    ],
)
def test_refusals_are_one_sentence(capsys, argv, says):
    assert cli.main(["bench", *argv.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("torch_lowcomm bench: ") and says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("gossip", ("'gossip'", "all_reduce", "sendrecv")),
        ("all_gather -o max", ("unrecognized arguments: -o max",)),
        ("all_reduce --peer mpi", ("'mpi'", "gloo")),
        ("all_reduce -o med", ("--op", "'med'", "prod")),
        ("all_reduce -d fp4", ("--datatype", "'fp4'", "half")),
        ("all_reduce -b 1X", ("--minbytes: expected a number above 0 such as 65536, 64K or 1M, got '1X'",)),
        ("all_reduce --rate 0", ("--rate: expected a number above 0", "'0'")),
    ],
)
def test_what_no_op_takes_is_refused(capsys, argv, says):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *argv.split()])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(part in last for part in says), last


def test_gloo_must_be_gloo(capsys, monkeypatch):
    monkeypatch.setenv("LOWCOMM_AS_GLOO", "1")
    assert cli.main(["bench", "all_reduce", "--peer", "gloo"]) == 2
    assert "expected torch's gloo, got LOWCOMM_AS_GLOO=1" in capsys.readouterr().err


@pytest.mark.later
def test_ranks_of_its_own(tmp_path):
    """As a user starts it, with everything that it writes, and the environment's policy."""
    command = [sys.executable, "-m", "torch_lowcomm", "bench", "all_gather", *SMALL]
    options = ["--peer", "gloo", "--json", tmp_path / "made" / "rows.json"]
    policy = {"LOWCOMM_POLICY": "all_gather=sym4"}
    ended = ranks.run_command([*command, *options], deadline_s=120, cwd=tmp_path, env=policy)
    assert ended.code == 0, ended.text
    assert "policy=all_gather=sym4:bucket=1024 " in ended.out
    assert [row["size"] for row in parsed(ended.out)] == ["4096", "65536"]
    assert len(json.loads((tmp_path / "made" / "rows.json").read_text())["rows"]) == 2


@pytest.mark.later
def test_under_torchrun_a_codec_that_codes_nothing_is_an_error(tmp_path):
    command = [*ranks.torchrun(2, "--standalone"), "-m", "torch_lowcomm", "bench", "all_gather", *SMALL]
    options = ["-d", "int8", "--codec", "sym4"]
    ended = ranks.run_command([*command, *options], deadline_s=120, cwd=tmp_path)
    assert ended.code != 0
    said = [line for line in ended.err.splitlines() if line.startswith("torch_lowcomm bench: ")]
    assert said == [
        "torch_lowcomm bench: expected all_gather of int8 to be coded by sym4:bucket=1024, got 2 exact calls of 2: "
        "dtype Char"
    ], ended.text
    assert "# torch_lowcomm bench all_gather" in ended.out


def _stall(_):
    if os.environ["RANK"] == "1":
        os._exit(7)
    time.sleep(600)
    return 0


def test_ranks_that_do_not_end_are_ended(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    assert launch.local_ranks(_stall, None, ranks=2) == 7
    assert not multiprocessing.active_children()


def _die(_):
    if os.environ["RANK"] == "1":
        os._exit(7)
    dist.barrier()
    return 0


def test_a_rank_that_dies_is_named_by_the_others(capfd):
    assert launch.local_ranks(_die, None, ranks=2) == 7
    assert not multiprocessing.active_children()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("torch_lowcomm bench: ")]
    assert len(said) == 1 and said[0].startswith("torch_lowcomm bench: rank 0: "), said
    assert "barrier" in said[0] or "rank 1" in said[0]
