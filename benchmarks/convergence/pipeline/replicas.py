"""AQ-SGD in two replicas of a pipeline, whose averages are exact or coded: losses, and how many of all bytes are coded."""

from __future__ import annotations

import itertools
from typing import Any

from report import Gate

from convergence import flattery
from convergence.pipeline import gates as pipeline_gates
from convergence.pipeline import runs as pipeline_runs
from convergence.pipeline.presets import GAUSS, shortened
from convergence.pipeline.rank import Configuration

# The paper's end-to-end compression (section 4.3): 3 bits forward, 6 backward, 4 of the parameters' gradients.
END_TO_END = ("gauss3", "gauss6")


def replicated(codecs: tuple[str, str] | None = None, *, store: str = "fp16", **others: Any) -> Configuration:
    """AQ-SGD of presets.py in two replicas; without a store DirectQ, without codecs exact."""
    named = dict(zip(("forward", "backward"), codecs or (), strict=False))
    size = {"stages": 2, "replicas": 2, "batch": 8, "samples": 512, "epochs": 8}
    return Configuration(codecs=named, store=store if codecs else "", **size, **others)


PRESETS = {
    "exact": replicated(),
    "AQ gauss2/gauss4": replicated(GAUSS),
    "AQ gauss2/gauss4, QuantizedAdam": replicated(GAUSS, optimizer="quantized_adam"),
    "exact, QuantizedAdam": replicated(optimizer="quantized_adam"),
    "AQ gauss2/gauss4, DiLoCoX": replicated(GAUSS, optimizer="diloco"),
    **{
        f"{way} gauss3/gauss6, QuantizedAdam": replicated(END_TO_END, store=store, optimizer="quantized_adam")
        for way, store in (("AQ", "fp16"), ("DirectQ", ""))
    },
    "exact, DiLoCoX": replicated(optimizer="diloco"),
}


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything, and prints a row a run. `quick`: fewer samples and epochs, and the first three runs."""
    print(pipeline_runs.COLUMNS.heading())
    presets = PRESETS
    if quick:
        presets = {name: shortened(c) for name, c in itertools.islice(PRESETS.items(), 3)}
    runs: pipeline_runs.Runs = {}
    for run in pipeline_runs.of_presets(presets, range(seeds)):
        runs.setdefault(run["name"], []).append(run)
    pipeline_gates.print_ratios(runs)
    return pipeline_runs.to_json(runs), [
        flattery.gate(runs, lambda name: pipeline_gates.baseline(name, runs)),
        *pipeline_gates.cache_gates(runs),
    ]
