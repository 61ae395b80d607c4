"""The cost of seed replay beyond its forward passes, and of weights kept in 8 or 4 bits (`base=`): time, memory, loss.

    python benchmarks seed_replay_cost [--quick] [--only time|memory|loss] [--json FILE]

benchmarks/results/seed_replay_cost.md has the definitions. Loss: a byte-level GPT that back-propagation has trained on the
sources of Python's library is tuned by forward passes alone on its English documentation (pydoc_data), every run from the same
weights on the same batches along the same directions.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import launch
import model
import paired
import report
import torch
from tables import Columns
from torch import Tensor, nn

import torch_lowcomm as lc
from torch_lowcomm import _C

SAMPLES, BATCH, ITERATIONS = 8, 16, 20
LAYERS, WIDTH = 16, 2048  # of the net whose memory is looked at
SHAPE = model.Config(width=64, layers=2)  # 0.11 million parameters, whose loss is
# Bytes a parameter by the formula: codes, and a scale a block; the validation loss by the fp32 base's.
BASES: dict[str | None, tuple[float, float | None]] = {
    None: (4.0, None),
    "int8": (1 + 4 / 64, 1.01),
    "nf4": (0.5 + 4 / 64, 1.05),
}
_MMAP_THRESHOLD = -3  # of mallopt()
Part = tuple[dict[str, Any], list[report.Gate]]


def timed(call: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def step_cost(noise: str, repetitions: int) -> dict[str, Any]:
    """An iteration of n two-sided samples against the 2n forward passes alone, in turn; and a log that is caught up with."""
    torch.manual_seed(0)
    net = model.GPT(model.Config()).eval()
    optimizer = lc.SeedReplay(net, lr=1e-6, samples=SAMPLES, noise=noise)
    corpus, context = data.load(), model.Config().context
    batches = [corpus.batch(BATCH, context, seed=0, step=s, rank=0) for s in range(SAMPLES)]

    def loss(sample: int) -> Tensor:
        return net(*batches[sample])

    def forwards() -> None:
        with torch.no_grad():
            for sample in range(2 * SAMPLES):
                float(loss(sample // 2))

    forwards()
    optimizer.step(loss)
    pairs = [(timed(forwards), timed(lambda: optimizer.step(loss))) for _ in range(repetitions)]
    ratios = [step / plain for plain, step in pairs]
    for _ in range(ITERATIONS):
        optimizer.step(loss)
    late = lc.SeedReplay(model.GPT(model.Config()), lr=1e-6, samples=SAMPLES, noise=noise)
    log, step_s = optimizer.core.log, statistics.median(step for _, step in pairs)
    replay_s = timed(lambda: late.replay(log)) / optimizer.iteration
    return {
        "noise": noise,
        "forwards_s": statistics.median(plain for plain, _ in pairs),
        "step_s": step_s,
        "ratio": statistics.median(ratios),
        "spread": (min(ratios), max(ratios)),
        "replay_s": replay_s,
        "catch_up": step_s / replay_s,
        "direction_ns": direction_ns(noise, repetitions),
    }


def direction_ns(noise: str, repetitions: int) -> float:
    """Nanoseconds an element to apply a record of 16 estimates, the least."""
    w = torch.zeros(1 << 24)
    options = {"noise": noise, "codec": "none", "lr_scale": "mean", "seed": 0, "pool": 0, "base": ""}
    core = _C.SeedReplay([("w", w, True, 0)], options)

    def apply() -> None:
        core.apply(core.record([core.message(0, [1e-3] * 16)], lr=1e-3, weight_decay=0.0))

    return min(timed(apply) for _ in range(1 + repetitions)) / w.numel() * 1e9


def measure_time(*, quick: bool) -> Part:
    """By noise."""
    columns = Columns(
        "noise 12 | forwards s 11.4f | step s 9.4f | ratio 8.4f | least 8.4f | most 8.4f | replay s 10.5f | "
        "x 8.1f | ns an element of 16 21.3f"
    )
    print(columns.heading())
    rows, gates = [], []
    for noise in ("rademacher", "gaussian"):
        rows.append(row := step_cost(noise, 3 if quick else 9))
        names = ("replay_s", "catch_up", "direction_ns")
        cells = [row[name] for name in ("forwards_s", "step_s", "ratio")] + [*row["spread"], *map(row.get, names)]
        print(columns.row(noise, *cells), flush=True)
        gates.append(report.Gate(f"an iteration's time / its replay's, {noise}", row["catch_up"], ">=", 10))
    gates.append(report.Gate("a step / its forward passes, rademacher", rows[0]["ratio"], "<", 1.05))
    return {"steps": rows}, gates


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def _settle() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident(rank: int, init_method: str, *, base: str | None) -> dict[str, float]:
    """Bytes a parameter that a model and its optimizer keep resident, and by which a step's peak is above them."""
    ctypes.CDLL(None).mallopt(
        _MMAP_THRESHOLD, 1 << 20
    )  # blocks of 1 MiB or more go back to the system when they are freed
    x = torch.randn(BATCH, WIDTH)

    def machine(layers: int) -> Callable[[], float]:
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).eval()
        optimizer = lc.SeedReplay(net, 1e-6, samples=1, pool=16, base=base)
        return lambda: optimizer.step(lambda: net(x).square().mean())

    machine(1)()  # of libraries what a step needs is in memory from here on
    _settle()
    before = _status("VmRSS")
    step = machine(LAYERS)
    step()
    _settle()
    after = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here on
    step()
    parameters = LAYERS * WIDTH * WIDTH
    return {"resident": (after - before) / parameters, "peak": (_status("VmHWM") - after) / parameters}


def measure_memory(*, quick: bool) -> Part:
    """Resident bytes a parameter, each base in a process of its own."""
    columns = Columns("base 12 | resident 10.3f | formula 10.4f | step peak 11.3f")
    print(columns.heading())
    rows, gates = [], []
    for base, (formula, _) in BASES.items():
        name = base or "fp32"
        (entry,) = launch.run(resident, ranks=1, deadline_s=600, base=base)
        rows.append({"base": name, "formula": formula, **entry})
        print(columns.row(name, entry["resident"], formula, entry["peak"]), flush=True)
        title = f"{name}: resident bytes a parameter / by the formula"
        gates.append(report.Gate(title, entry["resident"] / formula, "<", 1.1))
    # A layer's weights are 1 / LAYERS of 4 bytes a parameter.
    gates.append(report.Gate("fp32: a step's peak / a layer's weights", rows[0]["peak"] * LAYERS / 4, "<=", 1.1))
    return {"memory": rows}, gates


def tune(rank: int, init_method: str, *, base: str | None, seed: int, trained: int, steps: int) -> dict[str, float]:
    """Trains a GPT on source text and tunes it on English; returns the validation loss on English (nats a byte) `before` tuning,
    of the float32 weights, and `after`.
    """
    torch.manual_seed(seed)
    gpt = model.GPT(SHAPE)
    inner, sources = torch.optim.AdamW(gpt.parameters(), lr=2e-3, fused=True), data.load()
    for step in range(trained):
        gpt(*sources.batch(16, SHAPE.context, seed=seed, step=step, rank=0)).backward()
        inner.step()
        inner.zero_grad()
    english = data.load(Path(pydoc_data.topics.__file__))

    def validation() -> float:
        with torch.no_grad():
            return float(gpt.eval()(*english.validation_batch(256, SHAPE.context, 0)))

    before = validation()
    # The rate was found on seed 100 in float32.
    optimizer = lc.SeedReplay(gpt, 2e-3, eps=1e-3, samples=4, pool=256, base=base, seed=seed)
    for step in range(steps):
        batches = [english.batch(16, SHAPE.context, seed=seed, step=step, rank=sample) for sample in range(4)]
        optimizer.step(lambda sample, batches=batches: gpt(*batches[sample]))
    return {"before": before, "after": validation()}


def measure_loss(*, quick: bool) -> Part:
    """Tunes by each base and seed."""
    columns = Columns("base 12 | seed 5 | before 9.4f | after 9.4f")
    print(columns.heading())
    rows: dict[str, list[dict[str, Any]]] = {}
    for seed in range(1 if quick else 3):
        for base in BASES:
            name, size = base or "fp32", {"trained": 100, "steps": 15} if quick else {"trained": 200, "steps": 150}
            (entry,) = launch.run(tune, ranks=1, deadline_s=3600, base=base, seed=seed, **size)
            rows.setdefault(name, []).append({"base": name, "seed": seed, **entry})
            print(columns.row(name, seed, entry["before"], entry["after"]), flush=True)
    learned = max(row["after"] / row["before"] for row in rows["fp32"])
    gates = [report.Gate("fp32: validation loss after / before, largest", learned, "<", 1.0 if quick else 0.97)]
    for base, (_, bound) in BASES.items():
        if base and bound:
            title = f"loss {base} / fp32"
            found = paired.ratio(lambda row: row["after"], rows[base], rows["fp32"]).show(title)
            gates.append(found.gate(title, "<", bound))
    return {"loss": [row for of_base in rows.values() for row in of_base]}, gates


PARTS = {"time": measure_time, "memory": measure_memory, "loss": measure_loss}


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 repetitions; a tenth of the steps, of one seed")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(report.heading("seed_replay_cost", quick=args.quick, threads=1, samples=SAMPLES, batch=BATCH))
    content: dict[str, Any] = {}
    gates: list[report.Gate] = []
    for name, part in PARTS.items():
        if args.only in (None, name):
            rows, held = part(quick=args.quick)
            content |= rows
            gates += held
    return report.finish(gates, args.json, content)
