"""A fixed share of the fault matrix (benchmarks/faults), and that its judge and its rows are what they say."""

import copy
import dataclasses
import sys

import pytest
from ranks.starters import TESTS

sys.path.insert(0, str(TESTS.parents[1] / "benchmarks"))

from faults import cases, cli, judge
from faults.rows import Row
from faults.run import Runner
from links import expect_labs

# Every fault and every op once, each with one of the others.
SHARE = (
    "all_reduce,exact,kill -9,before,2",
    "all_reduce,compressed,kill -9,during,4",
    "all_gather,compressed,SIGSTOP,after,2",
    "send/recv,compressed,long cut,during,2",
    "all_to_all,compressed,short cut,during,2",
    "gather,exact,SIGSTOP,during,4",
    "reduce_scatter,exact,another shape,before,2",
    "all_to_all,compressed,another op,before,2",
    "broadcast,compressed,another shape,after,2",
    "all_reduce,compressed,another codec,during,4",
)


@pytest.fixture(scope="module")
def runner():
    with Runner() as made:
        yield made


@pytest.mark.later
@pytest.mark.parametrize("name", SHARE)
def test_a_row_holds(runner, name):
    (case,) = cli.chosen([name])
    if case.needs_lab:
        expect_labs()
    for _ in range(3):
        row = runner.run(case)
        if judge.TOO_LATE not in row.reasons:
            break
    # How late an error came is the benchmark's to judge: seconds on a busy machine fail no test.
    reasons = [reason for reason in row.reasons if "s after the deadline" not in reason]
    assert not reasons, "\n".join(reasons)


def test_every_row_is_there_once_or_says_why_not():
    rows = list(cases.matrix())
    assert len(rows) == len(set(rows)) == 7 * 2 * 7 * 3 * 2
    impossible = [case for case in rows if case.impossible()]
    assert len(impossible) == 7 * 3 * 2
    assert all(case.kind == "exact" for case in impossible)
    assert [row.verdict for row in map(Runner().run, impossible)] == ["n/a"] * len(impossible)
    assert {case.fault for name in SHARE for case in cli.chosen([name])} == set(cases.FAULTS)
    assert {case.op for name in SHARE for case in cli.chosen([name])} == set(cases.OPS)
    with pytest.raises(ValueError, match="--only: expected rows by op,kind,fault,when,ranks"):
        cli.chosen(["*", "all_reduce"])


MESSAGE = (
    "lowcomm: all_reduce failed between rank {} (global 0) and rank 1 (global 1): why [op all_reduce, sequence 4, "
    "group 0, bytes sent 1, bytes received 2, elapsed 0.100 s, progress deadline 1000 ms]"
)


def seen(rank):
    """Returns the facts of a rank in a row that holds."""
    failed = {"called": 10.0, "ended": 10.5, "error": "DistBackendError", "message": MESSAGE.format(rank)}
    failed |= {"equal": None, "residual": "kept"}
    facts = {"attempts": [failed], "fault_at": 10.1, "resumed_at": 0.0, "premature": ""}
    return facts | {"went_on": "equal"}


def _attempt(facts, **changes):
    facts["attempts"][0].update(changes)


SPOILT = {
    "no error": lambda facts: _attempt(facts, error="", message="", equal=True, residual="committed"),
    "gave other bits": lambda facts: _attempt(facts, error="", message="", equal=False, residual="committed"),
    "its residual is committed after DistBackendError": lambda facts: _attempt(facts, residual="committed"),
    "its residual is kept after success": lambda facts: _attempt(facts, error="", message="", equal=True),
    "expected a DistBackendError, got RuntimeError": lambda facts: _attempt(facts, error="RuntimeError"),
    "no ['sequence": lambda facts: _attempt(facts, message=MESSAGE.format(0).replace("sequence", "number")),
    "its error came 2.4 s after the deadline": lambda facts: _attempt(facts, ended=13.5),
    "expected the next group to be equal, got ''": lambda facts: facts.update(went_on=""),
    "its part was over": lambda facts: facts.update(premature="its part was over"),
}


def test_the_judge_sees_what_is_wrong():
    (case,) = cli.chosen(["all_reduce,compressed,another shape,during,2"])
    good = [seen(0), seen(1)]
    verdict = judge.judge(case, good)
    assert verdict.passed, verdict.reasons
    assert verdict.late_s == pytest.approx(-0.6)
    for reason, spoil in SPOILT.items():
        facts = copy.deepcopy(good)
        spoil(facts[0])
        verdict = judge.judge(case, facts)
        assert not verdict.passed
        assert any(reason in said for said in verdict.reasons), (reason, verdict.reasons)
    short = dataclasses.replace(case, fault="short cut")
    assert any("DistBackendError: lowcomm" in reason for reason in judge.judge(short, good).reasons)


def test_the_table_counts_rows():
    rows = [Row(case, "PASS" if case.when != "after" else "FAIL") for case in cli.chosen(["gather,compressed,kill*"])]
    rows += map(Runner().run, cli.chosen(["gather,exact,another codec*"]))
    text = cli.table(rows)
    assert "| gather | compressed | **4/6** |" in text
    assert "n/a" in text
