"""`python -m torch_lowcomm plan`: of a script, of numbers, of a measured link, and its mistakes."""

import json
import os
import subprocess
import sys

import pytest
from links import ENV

PLAN = [sys.executable, "-m", "torch_lowcomm", "plan"]
SCRIPT = """
import torch
from parts import WIDTH

def build():
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)), torch.nn.Flatten(0))
    return Loss(model), (torch.randn(8, WIDTH),)

class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()

def other():
    return 1
"""
NUMBERS = ["--parameters", "1e7", "--step-seconds", "0.3"]


def planned(*words, cwd=None):
    """(exit status, what it says)."""
    command = [*PLAN, *map(str, words)]
    ended = subprocess.run(
        command, env=os.environ | ENV, cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout + ended.stderr


def test_a_script_and_a_measured_link(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "parts.py").write_text("WIDTH = 64\n")
    rows = [{"from": a, "to": 1 - a, "by": "eth0", "both": [90.0 - 10 * a, 95.0], "rtt_us": 40e3} for a in (0, 1)]
    rows.append({"from": 0, "to": 1, "by": "slow", "both": [5.0, 5.0], "rtt_us": 40e3})
    rows.append({"from": 1, "to": 0, "by": "none", "both": [], "rtt_us": 0.0})
    (tmp_path / "link.json").write_text(json.dumps({"ranks": 4, "hosts": 2, "rows": rows}))
    status, said = planned("train.py:build", "--link", "link.json", cwd=tmp_path)
    assert status == 0 and "exact DDP" in said and "error of codecs on the model's gradients: sym4:bucket=128" in said
    assert "To paste:" in said or "Do not compress" in said, said


def test_numbers():
    status, said = planned(*NUMBERS, "--rate", "100mbit", "--sites", 4, "--tokens", 512, "--width", 384, "--layers", 6)
    assert status == 0 and "pipeline, 4 bits" in said and "DDP, rank 4" in said, said
    assert "pipeline" not in planned(*NUMBERS, "--rate", "10mbit/100mbit", "--max-loss", 1.0)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "1gbit"], "expected SCRIPT.py:FUNCTION, or --parameters and --step-seconds, got neither"),
        (NUMBERS, "expected --link or --rate, got neither"),
        ([*NUMBERS, "--rate", "1gbit", "--link", "x"], "expected --link or --rate, got both"),
        ([*NUMBERS, "--rate", "fast"], 'rate: expected a number and a unit, such as "100mbit"'),
        (
            [*NUMBERS, "--link", "absent.json"],
            "absent.json: expected the JSON of `doctor --json`, got FileNotFoundError",
        ),
        ([*NUMBERS, "--rate", "1gbit", "--memory", "1e6"], "bytes a rank for "),
        (["absent.py:build", "--rate", "1gbit"], "absent.py'"),
        ([*NUMBERS, "--link", "x", "--rtt", "1ms"], "expected no --rtt beside --link, which has it"),
        (["x.py:y", *NUMBERS, "--rate", "1gbit"], "expected no --parameters beside a script, which has it"),
        ([*NUMBERS, "--rate", "1gbit", "--tokens", "9"], "--tokens: expected --width and --layers too"),
        (["--parameters", "inf", "--step-seconds", "1", "--rate", "1gbit"], "cannot convert float infinity"),
        (["train.py", "--rate", "1gbit"], "expected SCRIPT.py:FUNCTION, got 'train.py'"),
        (["train.py:none", "--rate", "1gbit"], "expected a function that returns (module, batch), got NoneType"),
        (["train.py:other", "--rate", "1gbit"], "expected a function that returns (module, batch), got int"),
    ],
)
def test_mistakes(tmp_path, words, said):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "parts.py").write_text("WIDTH = 64\n")
    status, text = planned(*words, cwd=tmp_path)
    assert status == 2 and said in text, text


def test_links_that_cannot_be_planned(tmp_path):
    for content, said in (
        (
            {"ranks": 3, "hosts": 2, "rows": [{"from": 0, "to": 1, "both": [9.0], "rtt_us": 1}]},
            "as many ranks on every host",
        ),
        (
            {"ranks": 2, "hosts": 2, "rows": [{"from": 0, "to": 1, "both": [], "rtt_us": 0}]},
            "a pair of hosts that reach",
        ),
        ({"ranks": 2}, "expected the JSON of `doctor --json`"),
    ):
        (tmp_path / "link.json").write_text(json.dumps(content))
        status, text = planned(*NUMBERS, "--link", tmp_path / "link.json")
        assert status == 2 and said in text, text
