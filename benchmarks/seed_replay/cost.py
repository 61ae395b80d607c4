"""The cost of seed replay beyond its forward passes: time, memory, catching up, fused directions.

benchmarks/results/seed_replay_cost.md has the definitions.

python benchmarks seed_replay_cost [--repetitions 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import model
import report
import torch
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm import _C

SAMPLES, BATCH, ITERATIONS = 8, 16, 20
_MMAP_THRESHOLD = -3  # of mallopt()
LAYERS, WIDTH = 16, 2048  # of the net whose memory is looked at


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def timed(call: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def step_cost(noise: str, repetitions: int) -> dict[str, Any]:
    """An iteration of n two-sided samples against the 2n forward passes alone, in turn."""
    torch.manual_seed(0)
    net = model.GPT(model.Config()).eval()
    optimizer = lc.SeedReplay(net, lr=1e-6, samples=SAMPLES, noise=noise)
    corpus = data.load(None, context=model.Config().context)
    batches = [corpus.batch(BATCH, model.Config().context, seed=0, step=s, rank=0) for s in range(SAMPLES)]

    def loss(sample: int) -> torch.Tensor:
        x, y = batches[sample]  # [BATCH, context]
        return net(x, y)

    def forwards() -> None:
        with torch.no_grad():
            for sample in range(SAMPLES):
                float(loss(sample))
                float(loss(sample))

    forwards()
    optimizer.step(loss)
    pairs = [(timed(forwards), timed(lambda: optimizer.step(loss))) for _ in range(repetitions)]
    ratios = [step / plain for plain, step in pairs]
    iterations = statistics.median(step for _, step in pairs)
    for _ in range(ITERATIONS):
        optimizer.step(loss)
    late = lc.SeedReplay(model.GPT(model.Config()), lr=1e-6, samples=SAMPLES, noise=noise)
    log = optimizer.core.log
    replayed = timed(lambda: late.replay(log)) / optimizer.iteration
    return {
        "noise": noise,
        "forwards_s": statistics.median(plain for plain, _ in pairs),
        "step_s": iterations,
        "ratio": statistics.median(ratios),
        "spread": (min(ratios), max(ratios)),
        "replay_s": replayed,
        "catch_up": iterations / replayed,
    }


def peak(call: Callable[[], object]) -> float:
    """MB that the process' resident memory rises by, at its highest, while it runs."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM from here on
    before = _status("VmRSS")
    call()
    return (_status("VmHWM") - before) / 1e3


def keep_blocks_out_of_heap() -> None:
    """Blocks of 1 MiB or more go back to the system when they are freed, from here on."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def resident_bytes() -> int:
    """Of this process."""
    return 1024 * _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def memory(repetitions: int) -> dict[str, float]:
    """Peaks of a forward pass and of an iteration over the same net."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).eval()
    optimizer = lc.SeedReplay(net, lr=1e-6, samples=1)
    x = torch.randn(BATCH, WIDTH)

    def forward() -> float:
        with torch.no_grad():
            return float(net(x).square().mean())

    forward()
    optimizer.step(forward)
    # Glibc keeps blocks of so many bytes in its heap once one was given back: layers that are long gone stay resident.
    heap = statistics.median(peak(lambda: optimizer.step(forward)) for _ in range(repetitions))
    keep_blocks_out_of_heap()
    optimizer.step(forward)
    return {
        "step_in_heap_mb": heap,
        "forward_mb": statistics.median(peak(forward) for _ in range(repetitions)),
        "step_mb": statistics.median(peak(lambda: optimizer.step(forward)) for _ in range(repetitions)),
        "layer_mb": 4 * WIDTH * WIDTH / 1e6,
        "weights_mb": 4 * WIDTH * WIDTH * LAYERS / 1e6,
    }


def fused(noise: str, repetitions: int) -> dict[str, Any]:
    """A record of 16 estimates against 16 passes over the weights, and one pass against an in-place add."""
    w, other = torch.zeros(1 << 24), torch.zeros(1 << 24)
    options = {"noise": noise, "codec": "none", "lr_scale": "mean", "seed": 0, "pool": 0, "base": ""}
    core = _C.SeedReplay([("w", w, True, 0)], options)

    def at_once() -> None:
        core.apply(core.record([core.message(0, [1e-3] * 16)], lr=1e-3, weight_decay=0.0))

    def one_by_one() -> None:
        for sample in range(16):
            core.perturb(0, sample, 1e-6)

    at_once()
    one_by_one()
    rows = [(timed(at_once), timed(one_by_one), timed(lambda: w.add_(1e-9))) for _ in range(repetitions)]
    best = [min(column) for column in zip(*rows, strict=True)]
    del other
    return {
        "noise": noise,
        "fused_ns": best[0] / w.numel() * 1e9,
        "pass_ns": best[1] / 16 / w.numel() * 1e9,
        "add_ns": best[2] / w.numel() * 1e9,
        "times": statistics.median(single / together for together, single, _ in rows),
        "of_add": best[2] / (best[1] / 16),
    }


def main() -> int:
    """Measures and reports."""
    args = parse()
    torch.set_num_threads(1)
    print(report.heading("seed_replay_cost", repetitions=args.repetitions, threads=1, samples=SAMPLES, batch=BATCH))
    print(
        f"# {'noise':<12} {'forwards s':>10} {'step s':>8} {'ratio':>7} {'least':>7} {'most':>7} {'replay s':>9} {'x':>7}"
    )
    steps = [step_cost(noise, args.repetitions) for noise in ("rademacher", "gaussian")]
    for row in steps:
        print(
            f"  {row['noise']:<12} {row['forwards_s']:>10.4f} {row['step_s']:>8.4f} {row['ratio']:>7.4f} "
            f"{row['spread'][0]:>7.4f} {row['spread'][1]:>7.4f} {row['replay_s']:>9.5f} {row['catch_up']:>7.1f}"
        )
    print(f"# {'noise':<12} {'16 at once':>10} {'a pass':>8} {'add':>7} {'x':>7} {'of add':>7}   (ns an element)")
    engine = [fused(noise, args.repetitions) for noise in ("rademacher", "gaussian")]
    for row in engine:
        print(
            f"  {row['noise']:<12} {row['fused_ns']:>10.3f} {row['pass_ns']:>8.3f} {row['add_ns']:>7.3f} "
            f"{row['times']:>7.2f} {row['of_add']:>7.3f}"
        )
    held = memory(args.repetitions)
    print("# peak MB above the model: " + ", ".join(f"{name} {value:.1f}" for name, value in held.items()))
    gates = [
        report.Gate("a step / its forward passes, rademacher", steps[0]["ratio"], "<", 1.05),
        report.Gate("an iteration's time / its replay's, rademacher", steps[0]["catch_up"], ">=", 10),
        report.Gate("an iteration's time / its replay's, gaussian", steps[1]["catch_up"], ">=", 10),
        report.Gate("16 passes / 16 directions at once, rademacher", engine[0]["times"], ">=", 4),
        report.Gate("an in-place add / a pass, rademacher", engine[0]["of_add"], ">=", 0.9),
        report.Gate(
            "(a step's peak - a forward pass') / a layer's weights",
            (held["step_mb"] - held["forward_mb"]) / held["layer_mb"],
            "<=",
            1.1,
        ),
    ]
    return report.finish(gates, args.json, {"steps": steps, "engine": engine, "memory": held})
