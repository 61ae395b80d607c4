"""A share of the faults of groups over TCP (benchmarks/faults/tcp), and that the rows and their judge are what they say."""

import re

import pytest
from faults.tcp import cases, cli, judge
from faults.tcp.run import Row, Runner
from links import expect_labs

# Rows that no other test has: those of test_tcp, test_relay and test_secret play the others, and TcpStrangers in
# tests/cpp those of strangers.
SHARE = (
    "lost resets,in,coded,plain,2",
    "another address, dials,before,exact,plain,2",
    "another address, is dialled,in,coded,secret,2",
    "no descriptors, dials,after,exact,secret,2",
    "no descriptors, is dialled,in,coded,plain,2",
    "resume, other process,in,exact,plain,2",
    "started again,in,coded,secret,2",
    "no secret,in,exact,secret,2",
    "wrong secret,after,exact,secret,2",
    "another group's,in,coded,secret,2",
    "another group's,in,coded,plain,2",
    "replayed,before,exact,secret,2",
    "reflected,in,coded,plain,2",
    "reflected,in,coded,secret,2",
)
SLOW = (
    "silent link,in,coded,plain,2",
    "silent for good,in,coded,plain,2",
    "router restarts,in,exact,plain,2",
    "relay dies,in,coded,plain,2",
    "behind two routers,in,coded,secret,4",
)


@pytest.fixture(scope="module")
def runner():
    expect_labs()
    with Runner() as made:
        yield made


@pytest.mark.parametrize("name", [*SHARE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_fault_over_tcp_comes_to_what_it_must(runner, name):
    (case,) = cli.chosen([name], list(cases.matrix()))
    expect_labs(*case.of.tools)
    row = runner.run(case)
    if row.verdict == "n/a":
        pytest.skip(row.reasons[0])
    # How long it took is the benchmark's to judge: seconds on a busy machine fail no test.
    reasons = [why for why in row.reasons if not re.search("an op took|ops took|its error came", why)]
    assert not reasons, "\n".join(reasons)


def test_every_row_of_tcp_is_there_once():
    rows = list(cases.matrix())
    assert len(rows) == len(set(rows)) == 480
    quick = list(cases.quick())
    assert {case.fault for case in quick} == {fault.name for fault in cases.FAULTS}
    assert set(quick) <= set(rows)
    assert {(case.size, case.secret, case.kind) for case in quick} == {
        (n, s, k) for n in (2, 4) for s in ("plain", "secret") for k in ("exact", "coded")
    }
    row = Row(rows[5], "PASS", [], {"pause_s": 0.5, "struck": 1.0}, 2.0)
    assert Row.from_json(row.to_json(), cases.Case) == Row(rows[5], "PASS", [], {"pause_s": 0.5}, 2.0)


def _ops(*seconds):
    return [("all_reduce", 1.0, one) for one in seconds]


def _facts(**changed):
    whole = {
        "ops": _ops(0.1, 0.1, 0.1),
        "undisturbed": 2,
        "wrong": 0,
        "called": 1.0,
        "ended": 0.0,
        "error": "",
        "message": "",
        "made": 0,
    }
    return {**whole, "making_s": 0.1, "again_s": 0.1, "paths": ["direct"], "went_on": True, **changed}


@pytest.mark.parametrize(
    ("name", "changed", "why"),
    [
        ("silent link,in,exact,plain,2", {"ops": _ops(0.1, 0.1, 4.1)}, None),
        ("silent link,in,exact,plain,2", {}, "held no op up"),
        ("lost resets,in,exact,plain,2", {}, None),
        ("silent link,in,exact,plain,2", {"wrong": 1}, "other bits"),
        ("silent link,in,exact,plain,2", {"error": "DistBackendError", "message": "timed out"}, "expected no error"),
        (
            "silent link,in,exact,plain,2",
            {"ops": _ops(0.1, 0.1, 9.0)},
            "an op took 9.00 s",
        ),
        ("silent link,in,exact,plain,2", {"went_on": None}, "the next group"),
        ("no secret,in,exact,secret,2", {"made": 1}, "1 connections were made again"),
        ("relay restarts,in,exact,plain,2", {}, "by a relay"),
        ("silent for good,in,exact,plain,2", {}, "expected an error, got none"),
        ("silent for good,in,exact,plain,2", {"error": "DistBackendError", "message": "sequence 4"}, "no .*elapsed"),
        ("made with another secret,before,exact,secret,2", {}, "expected that no group is made"),
    ],
)
def test_the_judge_of_tcp(name, changed, why):
    (case,) = cli.chosen([name], list(cases.matrix()))
    reasons = "\n".join(judge.judge(case, [_facts(**changed)] * case.size, {"struck": 1.0, "over": 5.0}, []))
    assert (reasons == "") if why is None else re.search(why, reasons), reasons
