"""examples/finetune_zeroth_order.py: two machines by torchrun, machines that come late and are killed at a store, its data."""

import importlib
import json
import signal
import tarfile
from io import BytesIO

import pytest
import ranks
from example_main import EXAMPLES, Machines, refusal, run_main

EXAMPLE = "finetune_zeroth_order"
DEADLINE_S = 150


@pytest.mark.slow
def test_example_tunes(tmp_path):
    outputs = []
    arguments = ["--steps", "100", "--batch", "16"]
    ranks.run_ranks(run_main, 2, EXAMPLE, str(tmp_path), arguments, timeout=120, outputs=outputs)
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["accuracy"][1] > result["accuracy"][0] + 0.1
    assert sum(result["loss"][-20:]) < 0.9 * sum(result["loss"][:20])
    assert result["gradients"] == 100 * 4 * 2
    assert result["payload_bytes"] == 100 * 4
    assert "accuracy after" in outputs[0]


@pytest.fixture
def machines(tmp_path):
    started = Machines(tmp_path, EXAMPLE)
    yield started
    started.end()


@pytest.mark.slow
def test_a_machine_joins_and_one_is_killed(machines, tmp_path):
    """A late machine ends with the weights of one that was there from the start, after a third was killed."""
    server = machines.start("--serve", "0")
    port = machines.until("store at port", server).split()[-1]
    common = ["--store", f"127.0.0.1:{port}", "--batch", "128", "--steps", "1500"]
    first = machines.start(*common, "--machine", "a")
    machines.until("machines=1", first)
    second, third = (machines.start(*common, "--machine", name, "--join") for name in "bc")
    machines.until("machines=3", first)
    second.send_signal(signal.SIGKILL)
    for process in (first, third):
        assert process.wait(timeout=DEADLINE_S) == 0, process.log.read_text()
    kept, late = (json.loads((tmp_path / "runs" / f"zeroth-{name}.json").read_text()) for name in "ac")
    assert late["first_step"] > 0
    assert late["checksum"] == kept["checksum"]
    assert late["accuracy"][1] == kept["accuracy"][1] > 0.6
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "--steps expects a positive number, got 0"),
        (["--machine", "a"], "--machine and --join expect --store HOST:PORT"),
        (["--store", "here", "--machine", "a"], "--store expects HOST:PORT and --machine ID with it"),
        (["--device", "cuda"], "--device cuda expects a GPU, got none"),
        ([], "expected to be started by torchrun"),
        (["--store", "h:1", "--machine", "a", "--prompt", "It was"], "--prompt expects {} where the sentence goes"),
        (["--store", "h:1", "--machine", "a", "--data", "/nowhere"], "--data expects a file, got /nowhere"),
        (["--store", "h:1", "--machine", "a", "--model", "/nowhere"], "--model expects smollm2 or a folder"),
    ],
)
def test_example_refuses_in_one_sentence(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in refusal(EXAMPLE, arguments, monkeypatch, capsys)
