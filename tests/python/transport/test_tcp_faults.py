"""A share of the faults of groups over TCP (benchmarks/faults/tcp)."""

import re

import pytest
from faults.tcp import cases, cli
from faults.tcp.run import Runner
from links import expect_labs

# Rows that no other test has: those of test_tcp, test_tcp_link, test_relay and test_secret play the others, and TcpStrangers in
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
