"""QSDP's variants: fewer bits with and without buckets, and the quantized master copy.

Runs, each a pair of processes over loopback: for each seed exact, W4G4 with buckets of 1024, with one bucket a tensor and with
one a flat buffer, and 8-bit weights whose decoded values are the master copy, by the nearest value and by a shifted lattice; for
the first seed other pairs of bits and other buckets, which no gate judges.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import paired
from report import Gate

from convergence.fsdp import runs as fsdp_runs
from convergence.fsdp.rank import Configuration

QUICK = ("W4G4/1024", "lattice master")
# Most tensors' grid of 8 bits has a half step of 3.5e-4 at first: AdamW's steps at 1e-3 are above it until late in a run, and
# the nearest master loses little.
SLOW = 3e-4
_MASTER: dict[str, Any] = {"gradients": "qsgd8:bucket=1024", "master": "quantized", "lr": SLOW}


def coded(weights: int, gradients: int, bucket: str = "1024") -> Configuration:
    """So many bits of weights and of gradients (32: exact), with buckets of a size."""
    return Configuration(
        weights=f"minmax{weights}:bucket={bucket}",
        gradients="none" if gradients == 32 else f"qsgd{gradients}:bucket={bucket}",
    )


VARIANTS = {
    "exact": Configuration(),
    "W4G4/1024": coded(4, 4),
    "W4G4/tensor": coded(4, 4, "tensor"),
    # Flat buffers as FSDP2 moves them, norms and all, each with one scale: what quantize() is there to avoid.
    "W4G4/flat buffer": Configuration(policy="all_gather=minmax4:bucket=tensor; reduce_scatter=qsgd4:bucket=tensor"),
    "exact, slow": Configuration(lr=SLOW),
    "nearest master": Configuration(weights="minmax8:bucket=1024", **_MASTER),
    "lattice master": Configuration(weights="lattice8:bucket=1024", **_MASTER),
}
ONE_SEED = {
    "W6G4/1024": coded(6, 4),
    "W5G4/1024": coded(5, 4),
    "W4G32/1024": coded(4, 32),
    "W4G4/128": coded(4, 4, "128"),
    "W4G4/65536": coded(4, 4, "65536"),
}
# Perplexity / that of the named exact run of the same seed, over 400 steps.
BOUNDS = {
    "W4G4/1024": ("exact", "<", 1.03),
    "W4G4/flat buffer": ("exact", ">", 1.2),
    "nearest master": ("exact, slow", ">", 1.1),
    "lattice master": ("exact, slow", "<", 1.1),
}


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run.

    `quick`: QUICK alone, for a few steps that are all hashed, without a gate on perplexity, which has not parted.
    """
    size, hashed = (fsdp_runs.QUICK, fsdp_runs.QUICK["steps"]) if quick else ({}, fsdp_runs.HASHED_STEPS)
    print(fsdp_runs.COLUMNS.heading())
    presets = {name: VARIANTS[name] for name in QUICK} if quick else VARIANTS | ONE_SEED
    runs: fsdp_runs.Runs = {name: [] for name in presets}
    for seed in range(seeds):
        common = {"seed": seed, "hashed_steps": 0 if seed else hashed, **size}
        for name, preset in presets.items():
            if seed == 0 or name not in ONE_SEED:
                runs[name].append(fsdp_runs.run(name, dataclasses.replace(preset, **common)))
    gates = [] if quick else perplexity_gates(runs)
    gates += [fsdp_runs.apart_gate(name, runs[name][0]) for name in BOUNDS if name in runs]
    return {"ranks": fsdp_runs.RANKS, **fsdp_runs.to_json(runs)}, gates


def perplexity_gates(runs: fsdp_runs.Runs) -> list[Gate]:
    """Of the mean ratio over seeds; prints the ratios of all runs."""
    gates = []
    for name, entries in runs.items():
        baseline, op, bound = BOUNDS.get(name, ("exact", "", 0.0))
        if name in ("exact", "exact, slow"):
            continue
        title = f"perplexity ratio {name} / {baseline}"
        found = paired.ratio(fsdp_runs.perplexity, entries, runs[baseline]).show(title)
        if op:
            gates.append(found.gate(title, op, bound))
    return gates
