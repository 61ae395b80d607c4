"""`python benchmarks diloco_lab`: shares and claims on cases worked out by hand, and its quick form on a lab."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from diloco import lab_cases, lab_gates, lab_table, measure, message, torchft_loop
from diloco.cases import ALONE, Case
from links import BENCHMARKS, ENV, expect_labs


def row(name, **fields):
    zeros = {field.name: 0.0 for field in dataclasses.fields(measure.Row)}
    return measure.Row(
        **{**zeros, "name": name, "rate": "100mbit", "step_s": 0.1, "fits": None, "shares": [1.0], **fields}
    )


def test_a_share_is_of_the_turns_next_to_it():
    """Two repetitions of: alone, a, alone, b."""
    seconds = [[1.0, 2.0], [2.0, 4.0], [3.0, 4.0], [5.0, 8.0]]
    shares = measure.shares_of([True, False, True, False], seconds)
    assert shares[0] == shares[2] == [1.0, 1.0]
    assert shares[1] == [(1 + 3) / 2 / 2, (2 + 4) / 2 / 4]
    assert shares[3] == [(3 + 2) / 2 / 5, 4 / 8], "the last has only one before it"


def test_codes_of_three_sites():
    """Each of three slices goes to its owner from two sites, and back to two."""
    shapes = [[512 * 3]]
    fp32 = Case("fp32", codec=None)
    assert message.payload_bytes(fp32, shapes, 3) == 4 * 512 * 3 * 4 / 3
    assert message.payload_bytes(fp32, shapes, 2) == 4 * 512 * 3


def test_what_is_sold_is_arithmetic():
    assert lab_cases.sold(row("continue fp32", fits=True), 100) and not lab_cases.sold(
        row("continue fp32", fits=False), 100
    )
    # 5 % of 100 steps of 0.1 s
    assert lab_cases.sold(row("sync gauss2", message_s=0.4), 100) and not lab_cases.sold(
        row("sync int4", message_s=0.6), 100
    )
    assert not lab_cases.sold(row(lab_cases.TORCHFT, message_s=0.0), 100)
    names = [case.name for case in lab_cases.Setting().turns(peer=True)]
    assert len(names) - names.count(ALONE) == len(set(names)) - 1 and names[0] == names[-1] == ALONE
    assert {lab_cases.peer_of(name) for name in names} == {None, lab_cases.TORCHFT, lab_cases.TORCHFT_STREAMING}


def test_claims_next_to_the_peer():
    losses = {lab_cases.TORCHFT: [2.0, 2.0], "sync gauss2": [1.98, 2.02]}
    measured = [
        row(ALONE),
        row(lab_cases.TORCHFT, sent=800.0, exposed_s=3.0),
        row("sync gauss2", sent=80.0, exposed_s=1.5, share=0.95),
    ]
    rows = lab_table.rows_of(measured, losses, lab_cases.Setting())
    ours = rows[2]
    assert (ours["fewer"], ours["peer_exposed_s"], ours["loss"], ours["loss_by_peer"]) == (10, 3.0, 2.0, 1.0)
    assert ours["loss_error"] == pytest.approx(0.01)
    gates = lab_gates.of_link("l, r", rows, 100, quick=False)
    found = {gate.name.removeprefix("l, r: sync gauss2, "): gate.passed for gate in gates}
    assert list(found.values()) == [True, True, False, True], found
    assert len(lab_gates.of_link("l, r", rows, 100, quick=True)) == 1
    # torchft is exposed for less than 1 % of 100 steps of 0.1 s: a third of that is not asked for.
    ours["exposed_s"], ours["peer_exposed_s"] = 0.08, 0.09
    gates = lab_gates.of_link("l, r", rows, 100, quick=False)
    assert [gate.value for gate in gates if gate.name.endswith("interval")] == [pytest.approx(0.008)]


def test_exposed_is_what_the_last_to_come_waits():
    assert measure.exposed([[0.0, 0.5, 0.1], [0.4, 0.1, 0.1]]) == 0.0 + 0.1 + 0.1


@pytest.mark.slow
def test_the_quick_form(tmp_path):
    """How fast the cases are is the benchmark's to judge."""
    expect_labs()
    path, picture = tmp_path / "lab.json", tmp_path / "lab.png"
    done = subprocess.run(
        [sys.executable, BENCHMARKS, "diloco_lab", "--quick", "--json", path, "--plot", picture],
        env={**os.environ, **ENV},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    (link,) = result["links"]
    peer = torchft_loop.available()
    assert [r["name"] for r in link["rows"]] == [ALONE, *(c.name for c in lab_cases.QUICK.cases(peer=peer))]
    assert all(r["sent"] > 0 and r["loss"] < 4 for r in link["rows"][1:])
    (trained,) = result["losses"]
    assert [r["losses"] for r in trained["rows"]] == [[r["loss"]] for r in link["rows"][1:]], "one seed"
    assert picture.read_bytes().startswith(b"\x89PNG")
