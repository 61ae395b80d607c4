"""Benchmark programs run their quick forms: rows and gates are written, and the gates on what is computed pass.

Left out: what needs a text or weights that are no package's (`pretrained`, `seed_replay_smollm2`, `stable_rank`,
`convergence split_learning`), and what takes minutes by waiting (`tcp_links`).
"""

import json
import os
import re
import sys

import pytest
import ranks
from example_main import EXAMPLES
from links import ENV, expect_labs

BENCHMARKS = EXAMPLES.parent / "benchmarks"
TEXT = "It is what it is, and it is not what it was. " * 200
# What a method of `convergence` is given, and how many gates its quick form has.
CONVERGENCE = {
    "aq": ([], 8),
    "aq_replicas": (["--seconds", "seconds.png"], 2),
    "ddp": ([], 9),
    "diloco": ([], 6),
    "diloco_bits": ([], 0),
    "diloco_rates": ([], 0),
    "fsdp": ([], 5),
    "fsdp_tables": (["--data", "text.txt"], 3),
    "fsdp_variants": (["--data", "text.txt"], 2),
    "seed_replay": ([], 7),
    "subspace": ([], 5),
    "subspace ratios": (["--only", "ratios", "--seconds", "seconds.png"], 1),
}
# Programs on links and of times: how fast their cases are is the benchmark's to judge, so a gate on seconds may fail here.
OTHERS = {  # with what holds its rows
    "diloco_lab": ("links", []),
    "diloco_late": ("rows", []),
    "pipelines": ("links", ["--only", "100mbit", "--repetitions", "1"]),
    "seed_replay_cost": ("steps", ["--only", "time"]),
    "subspace_links": ("settings", []),
}


def run(folder, *words, statuses=(0,)):
    """Runs a program's quick form in `folder`; returns the JSON that it writes and what it prints."""
    (folder / "text.txt").write_text(TEXT)
    command = [sys.executable, str(BENCHMARKS), *words, "--quick", "--json", "result.json"]
    env = {**os.environ, **ENV, "OMP_NUM_THREADS": "1"}
    status, out, err = ranks.run_command(command, env=env, deadline_s=600, cwd=folder)
    assert status in statuses, f"{out}\n{err}"
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "result.json").read_text()), out


@pytest.mark.slow
@pytest.mark.parametrize("method", CONVERGENCE)
def test_convergence(tmp_path, method):
    options, gates = CONVERGENCE[method]
    content, _ = run(tmp_path, "convergence", method.partition(" ")[0], "--plot", "plot.png", *options)
    assert len(content["gates"]) == gates and all(gate["pass"] for gate in content["gates"])
    assert {"python", "torch", "torch_lowcomm"} <= content["versions"].keys()
    for curve in content["curves"]:
        assert len({len(curve[key]) for key in ("step", "bytes", "seconds", "loss")}) == 1
    pictures = {"plot.png", *(word for word in options if word.endswith(".png"))}
    assert {path.name for path in tmp_path.glob("*.png")} == pictures


@pytest.mark.slow
@pytest.mark.parametrize("program", OTHERS)
def test_others(tmp_path, program):
    if program != "seed_replay_cost":
        expect_labs()
    rows, options = OTHERS[program]
    content, printed = run(tmp_path, program, *options, statuses=(0, 1))
    # The quick gates of diloco_lab are next to torchft.
    assert content[rows] and (content["gates"] or content.get("torchft") == "absent")
    for gate in content["gates"]:
        assert re.search(rf"^{'PASS' if gate['pass'] else 'FAIL'}  {re.escape(gate['name'])} ", printed, re.MULTILINE)


@pytest.mark.slow
def test_planned(tmp_path):
    """It has no quick form. Most rows are predicted, whatever a codec takes beside other work."""
    command = [sys.executable, str(BENCHMARKS), "planned", "--json", "result.json"]
    status, out, err = ranks.run_command(command, env={**os.environ, **ENV}, deadline_s=200, cwd=tmp_path)
    assert status in (0, 1), f"{out}\n{err}"
    content = json.loads((tmp_path / "result.json").read_text())
    assert len(content["gates"]) == 5
    assert sum(abs(row["ratio"] - 1) < 0.1 for row in content["rows"]) > 0.8 * len(content["rows"]), out
