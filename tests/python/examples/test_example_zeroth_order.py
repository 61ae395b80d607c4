"""examples/finetune_zeroth_order.py: two machines by torchrun, machines that come late and are killed at a store, its data."""

import importlib
import json
import os
import signal
import tarfile
import time
from io import BytesIO

import pytest
import ranks
from example_main import EXAMPLES, run_example, run_main

import torch_lowcomm as lc

EXAMPLE = "finetune_zeroth_order"
DEADLINE_S = 150


@pytest.mark.slow
def test_example_tunes(tmp_path):
    outputs, result = run_example(EXAMPLE, tmp_path, "--steps", "100", "--batch", "16")
    assert result["accuracy"][1] > result["accuracy"][0] + 0.1
    assert sum(result["loss"][-20:]) < 0.9 * sum(result["loss"][:20])
    assert result["gradients"] == 100 * 4 * 2
    assert result["payload_bytes"] == 100 * 4
    assert "accuracy after" in outputs[0]


def _machine(r, directory, port):
    """Machine a begins, and goes slowly until b and c, which come late, train with it; then b is killed."""
    name, step = "abc"[r.rank], lc.SeedReplay.step
    if name != "a":
        r.hear("begun", DEADLINE_S)

    def stepping(optimizer, closure):
        loss = step(optimizer, closure)
        if name == "a" and optimizer.iteration == 2:
            r.say("begun")
        if name == "a" and not r.path("together").exists():
            time.sleep(0.1 if optimizer.iteration < 50 else 2.0)  # on a busy machine they may be long in coming
        if name == "b" and optimizer.stats()["machines"] == 3:
            r.say("together")
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    lc.SeedReplay.step = stepping
    store = ["--store", f"127.0.0.1:{port}", "--machine", name, *([] if name == "a" else ["--join"])]
    run_main(r, EXAMPLE, f"{directory}/{name}", [*store, "--batch", "16", "--steps", "200"])


@pytest.mark.later
def test_a_machine_joins_and_one_is_killed(store, tmp_path):
    """A late machine ends with the weights of one that was there from the start, after a third was killed."""
    for name in "abc":
        (tmp_path / name).mkdir()
    gone = {1: -signal.SIGKILL}
    ranks.run_ranks(_machine, 3, str(tmp_path), store.port, timeout=DEADLINE_S, allow_exit=gone)
    kept, late = (json.loads((tmp_path / name / "run.json").read_text()) for name in "ac")
    assert late["first_step"] > 0
    assert late["checksum"] == kept["checksum"]
    assert late["accuracy"][1] == kept["accuracy"][1] > kept["accuracy"][0]
    assert kept["machines"][-1] == 2


def data(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("sentences")


def test_the_librarys_lines(monkeypatch):
    found = data(monkeypatch).load()
    assert found.classes == ("code", "comment")
    assert sum(index for _, index in found.train) == len(found.train) // 2
    assert len(found.train) > 1000 == len(found.validation)
    assert found.batch(5, 0, "a", 1) == found.batch(5, 0, "a", 1) != found.batch(5, 0, "b", 1)


def test_a_file_of_sentences(monkeypatch, tmp_path):
    file = tmp_path / "sentences.tsv"
    file.write_text("".join(f"{'yes' if i % 3 else 'no'}\tsentence {i}\n" for i in range(90)))
    found = data(monkeypatch).load(file)
    assert found.classes == ("no", "yes")
    pairs = found.train + found.validation
    assert len(pairs) == 60  # as many of each class
    assert all((int(text.split()[1]) % 3 > 0) == (index == 1) for text, index in pairs)


def test_reviews_within_an_archive(monkeypatch, tmp_path):
    lines = "".join(f"{i}\t{(-1) ** i * (1 + i % 3)}\tfilm {i}\n" for i in range(60)).encode()
    inner, outer = BytesIO(), tmp_path / "films.tar.gz"
    for target, name, content in (
        (inner, "reviews/movieReviewSnippets_GroundTruth.txt", lines),
        (outer, "package/reviews.tar.gz", None),
    ):
        content = inner.getvalue() if content is None else content
        file = {"name": target} if target is outer else {"fileobj": target}
        with tarfile.open(mode="w:gz", **file) as tar:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, BytesIO(content))
    found = data(monkeypatch).load(outer)
    assert found.classes == ("great", "terrible")
    pairs = found.train + found.validation
    assert len(pairs) == 40  # ratings of 1 and -1 are neither
    assert all(int(text.split()[1]) % 2 == index for text, index in pairs)
