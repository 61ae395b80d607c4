"""Split learning (examples/split_learning.py) with exact messages, codes, and codes of changes: paired seeds, two processes."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import launch
import split_learning
import torch
import torch.distributed as dist
from report import Gate
from tables import Columns

from convergence import flattery
from convergence.pipeline.gates import spread

NAMES = ("exact", "codes", "changes")
LAST = 50  # batches of which a run's training loss is the mean
POINT = 10  # batches of a point of a curve
QUICK = ["--images", "320", "--clients", "3", "--concentration", "5", "--rounds", "2", "--test-images", "500"]
DEADLINE_S = 1200  # of a seed


def run(rank: int, init_method: str, *, options: list[str]) -> list[dict[str, Any]]:
    """All runs of a seed on one side of the cuts; the clients' side measures."""
    args = split_learning.parse(options)
    torch.set_num_threads(1)
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=2)
    results, _ = split_learning.all_runs(args)
    dist.destroy_process_group()
    return [dataclasses.asdict(result) for result in results]


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run.

    `quick`: few images, clients and rounds. `seeds`: of images, clients and first weights. Raises RuntimeError: There
    are no images; one sentence.
    """
    if not split_learning.images.DEBIAN.exists():
        raise RuntimeError("expected Debian's package dataset-fashion-mnist to be installed")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    columns = Columns(
        "run 12 | seed 5 | training 10.4f | test loss 11.4f | accuracy 10.4f | MB sent 9.1f | seconds 9.1f"
    )
    print(columns.heading())
    for seed in range(seeds):
        options = [*(QUICK if quick else []), "--seed", str(seed)]
        clients, _ = launch.run(run, ranks=2, deadline_s=DEADLINE_S, options=options)
        for name, found in zip(NAMES, clients, strict=True):
            one = curve(name, seed, found)
            runs[name].append(one)
            cells = [one[of] for of in ("training", "validation", "accuracy")]
            print(columns.row(name, seed, *cells, one["sent"] / 1e6, one["seconds"][-1]), flush=True)
    print(f"# {'mean of seeds':<12}{'training':>18}{'test loss':>18}{'accuracy':>18}{'fewer bytes':>13}")
    for name, of_name in runs.items():
        cells = "".join(f"{spread([one[of] for one in of_name]):>18}" for of in ("training", "validation", "accuracy"))
        fewer = statistics.mean(exact["sent"] / one["sent"] for exact, one in zip(runs["exact"], of_name, strict=True))
        print(f"# {name:<12} {cells}{fewer:>13.1f}")
    configurations = {name: {"options": QUICK if quick else [], **split_learning.CODES} for name in NAMES}
    return {"configurations": configurations, "curves": [one for of_name in runs.values() for one in of_name]}, [
        flattery.gate(runs, lambda _: "exact", lambda one: one["training"])
    ]


def curve(name: str, seed: int, found: dict[str, Any]) -> dict[str, Any]:
    """A run as the JSON has it: a point every POINT batches. Both test figures are by exact messages."""
    steps = range(POINT, len(found["loss"]) + 1, POINT)
    return {
        "name": name,
        "seed": seed,
        "training": statistics.mean(found["loss"][-LAST:]),
        "validation": found["test_loss"],
        "accuracy": found["accuracy"],
        "sent": found["from_clients"] + found["from_server"],
        "step": list(steps),
        "loss": [round(statistics.mean(found["loss"][step - POINT : step]), 5) for step in steps],
        "bytes": [found["sent_bytes"][step - 1] for step in steps],
        "seconds": [round(found["seconds"] * step / len(found["loss"]), 2) for step in steps],
    }
