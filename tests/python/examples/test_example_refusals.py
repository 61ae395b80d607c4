"""An example that is asked for what it cannot do says so in one sentence, before it starts anything."""

import pytest
from example_main import refusal

REFUSALS = {
    "train_fsdp": [
        (["--steps", "0"], "--steps expects a positive number, got 0"),
        (["--weights", "zip9"], "zip9"),
        (["--gradients", "qsgd9"], "qsgd9"),
        (["--data", "nowhere"], "--data expects a file or a directory, got nowhere"),
        (["--data", "short.txt"], "--data expects at least 1300 bytes of text, got 5"),
        (["--resume"], "--resume expects --checkpoint DIR"),
        (["--resume", "--checkpoint", "nowhere"], "--resume expects a checkpoint in nowhere/exact, got none"),
        (["--backend", "gloo"], "--backend gloo expects --only exact"),
        (["--device", "cuda"], "--device cuda expects a GPU, got none"),
        ([], "expected to be started by torchrun"),
    ],
    "train_ddp": [
        (["--steps", "0"], "--steps expects a positive number, got 0"),
        (["--rank", "-2"], "--rank expects a positive number, got -2"),
        (["--codec", "zip9"], "zip9"),
        (["--projection-codec", "zip8"], "zip8"),
        (["--resume"], "--resume expects --checkpoint DIR"),
        (["--resume", "--checkpoint", "nowhere"], "--resume expects nowhere/exact/rank0.pt, found none"),
        (["--device", "cuda"], "--device cuda expects a GPU, got none"),
        ([], "expected to be started by torchrun"),
    ],
    "train_diloco": [
        (["--steps", "0"], "--steps expects a positive number, got 0"),
        (["--sync-every", "0"], "--sync-every expects a positive number, got 0"),
        (["--codec", "zip9"], "zip9"),
        (["--machine", "a"], "--machine expects --store HOST:PORT"),
        (["--site", "a"], "--site expects --store HOST:PORT"),
        (["--store", "h:1", "--site", "a"], "--site expects to be started by torchrun, and no --machine, got no RANK"),
        (["--store", "here", "--machine", "a"], "--store expects HOST:PORT, got 'here'"),
        (["--store", "here:1"], "--store expects --machine ID or --site ID with it, got neither"),
        (["--device", "cuda"], "--device cuda expects a GPU, got none"),
        ([], "expected to be started by torchrun"),
    ],
    "train_pipeline": [
        (["--epochs", "0", "--batch", "8"], "--epochs expects a positive number, got 0"),
        (["--batch", "6"], "--batch expects a multiple of --micro-batches, got 6 and 4"),
        (["--forward", "zip9", "--batch", "8"], "zip9"),
        (["--batch", "8", "--optimizer", "diloco"], "--optimizer diloco expects --replicas 2 or more, got 1"),
        (
            ["--batch", "16", "--samples", "16", "--replicas", "2"],
            "--samples expects a batch of 16 for each of 2 replicas, got 16",
        ),
        (["--batch", "8"], "expected to be started by torchrun"),
    ],
    "split_learning": [
        (["--rounds", "0"], "--rounds expects a positive number, got 0"),
        (["--forward", "zip9"], "zip9"),
        (
            ["--data", "nowhere"],
            "expects train-images-idx3-ubyte or train-images-idx3-ubyte.gz in nowhere, got neither",
        ),
    ],
    "train_subspace": [
        (["--steps", "0"], "--steps expects a positive number, got 0"),
        (["--batch", "6"], "--batch expects a multiple of --micro-batches, got 6 and 4"),
        (["--rank", "129", "--batch", "8"], "--rank expects 1...128, the model's width, got 129"),
        (["--coefficients", "zip9", "--batch", "8"], "zip9"),
        (["--kind", "coded", "--batch", "8"], "--kind coded expects --coefficients CODEC, got fp32"),
        (["--batch", "8"], "expected to be started by torchrun"),
    ],
    "finetune_zeroth_order": [
        (["--steps", "0"], "--steps expects a positive number, got 0"),
        (["--machine", "a"], "--machine and --join expect --store HOST:PORT"),
        (["--store", "here", "--machine", "a"], "--store expects HOST:PORT and --machine ID with it"),
        (["--device", "cuda"], "--device cuda expects a GPU, got none"),
        ([], "expected to be started by torchrun"),
        (["--store", "h:1", "--machine", "a", "--prompt", "It was"], "--prompt expects {} where the sentence goes"),
        (["--store", "h:1", "--machine", "a", "--data", "/nowhere"], "--data expects a file, got /nowhere"),
        (["--store", "h:1", "--machine", "a", "--model", "/nowhere"], "--model expects smollm2 or a folder"),
    ],
}


@pytest.mark.parametrize(
    ("name", "arguments", "expected"), [(name, *row) for name, rows in REFUSALS.items() for row in rows]
)
def test_an_example_refuses_in_one_sentence(tmp_path, monkeypatch, capsys, name, arguments, expected):
    (tmp_path / "short.txt").write_text("short")
    monkeypatch.chdir(tmp_path)
    assert expected in refusal(name, arguments, monkeypatch, capsys)
