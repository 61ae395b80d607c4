"""The bounds of the runs of `convergence aq`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import paired
from report import Gate

from convergence import flattery

Run = Mapping[str, Any]
Runs = Mapping[str, Sequence[Run]]  # by name, a seed each
# How a run's loss is taken: while it trained, by its own messages; of its trained weights, by exact messages.
LOSSES = {"training loss": flattery.last, "exact loss of the samples": lambda run: float(run["samples"])}
AQ, DIRECT = "AQ gauss2/gauss4", "DirectQ gauss2/gauss4"
# A run's distance from exact training over that of DirectQ: (run, DirectQ, bound).
GAPS = (
    ("AQ sym2/sym8", "DirectQ sym2/sym8", 0.10),
    (AQ, DIRECT, 0.10),
    ("AQ gauss1/gauss4", DIRECT, 0.25),  # DirectQ with one bit more
)
RATIO = 1.006  # of AQ to exact training
# The second bound was 4.1 when a scale served four tokens of this width: a token's own takes 0.125 bits an element.
FORWARD_BITS, BACKWARD_BITS = 2.7, 4.2
CHANGES = 0.3
MEMORY = 0.003  # of m in 8 bits to m in 16
# Validation by exact messages over exact training's, of what README and the pages recommend.
VALIDATION = 1.02
RECOMMENDED = (
    f"{AQ}, fine-tuning",
    "AQ gauss4/gauss4, fine-tuning",
    "DirectQ gauss4/gauss4, fresh",
    "DirectQ gauss4/gauss4, width 576",
    "DirectQ minmax4/minmax4, width 576",
    f"{AQ}, width 576, again",
)


def gates(runs: Runs, *, quick: bool) -> list[Gate]:
    """Those whose runs are there.

    With `quick` the gaps are of the training loss alone and have twice the bound: exact losses have not parted yet.
    """
    print_ratios(runs)
    compared = [
        gap_gate(runs, how, run, direct, 2 * bound if quick else bound)
        for run, direct, bound in GAPS
        if {"exact", run, direct} <= runs.keys()
        for how in itertools.islice(LOSSES, 1 if quick else None)
    ]
    recommended = [
        Gate(f"validation, {name} / exact", ratio(runs, name, "validation").mean, "<=", VALIDATION)
        for name in runs
        if name.startswith(RECOMMENDED) and baseline(name, runs) in runs
    ]
    return [
        flattery.gate(runs, lambda name: baseline(name, runs)),
        *recommended,
        *compared,
        *preset_gates(runs, quick=quick),
        *memory_gates(runs),
        *changes_gates(runs),
        *cache_gates(runs),
    ]


def baseline(name: str, runs: Runs | Mapping[str, Any]) -> str:
    """The run with exact messages that is otherwise as that one: "AQ …, fresh" has "exact, fresh"."""
    exact = ", ".join(["exact", *name.split(", ")[1:]])
    return exact if exact in runs else "exact"


def ratio(runs: Runs, name: str, of: str) -> paired.Ratio:
    """A figure of a run over that of exact training."""
    return paired.ratio(lambda run: run[of], runs[name], runs[baseline(name, runs)])


def mean(runs: Runs, name: str, how: str) -> float:
    """A loss, over seeds."""
    return statistics.mean(map(LOSSES[how], runs[name]))


def print_ratios(runs: Runs) -> None:
    """Prints a line for each run: its losses over those of exact messages, means over paired seeds with their deviations."""
    print(f"# {'loss / with exact messages':<45}{'training':>18}{'samples':>18}{'validation':>18}")
    for name, of_name in runs.items():
        if exact := runs.get(baseline(name, runs)):
            cells = [spread(paired.ratio(flattery.last, of_name, exact).by_seed)]
            cells += [spread(ratio(runs, name, of).by_seed) for of in ("samples", "validation")]
            print(f"#   {name:<43}" + "".join(f"{cell:>18}" for cell in cells))


def spread(values: Sequence[float]) -> str:
    """The mean over seeds, and their standard deviation where there are several."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def gap_gate(runs: Runs, how: str, name: str, direct: str, bound: float) -> Gate:
    """(AQ - exact) / (DirectQ - exact), of means over paired seeds."""
    ours, theirs = (mean(runs, of, how) - mean(runs, "exact", how) for of in (name, direct))
    print(f"# {how} - exact's, {name} and {direct}: {ours:.4f} and {theirs:.4f}")
    return Gate(f"{how}, ({name} - exact) / ({direct} - exact)", ours / theirs, "<=", bound)


def preset_gates(runs: Runs, *, quick: bool) -> list[Gate]:
    """Loss and bits of AQ with first visits in 8 bits."""
    if not {"exact", AQ} <= runs.keys():
        return []
    found = []
    for how, of in LOSSES.items():
        of_loss = paired.ratio(of, runs[AQ], runs["exact"]).show(f"{how}, {AQ} / exact")
        found.append(Gate(f"{how}, {AQ} / exact", of_loss.mean, "<=", 1.03 if quick else RATIO))
    # A first visit is a larger share of a quick run's visits.
    epochs = runs[AQ][0]["configuration"].epochs
    bounds = {"forward": (8.5 + (epochs - 1) * 2.2) / epochs if quick else FORWARD_BITS, "backward": BACKWARD_BITS}
    return found + [
        Gate(f"bits an element {way}, all visits, {AQ}", max(run[f"{way}_bits"] for run in runs[AQ]), "<=", bound)
        for way, bound in bounds.items()
    ]


def memory_gates(runs: Runs) -> list[Gate]:
    """A memory of 8 bits has the loss of one of 16; with 2 bits the loss is between that and DirectQ's."""
    names = (AQ, *(f"{AQ}, m in {bits} bits" for bits in (8, 2)), DIRECT)
    if not set(names) <= runs.keys():
        return []
    found = []
    for how in LOSSES:
        whole, eight, two, direct = (mean(runs, name, how) for name in names)
        found += [
            Gate(f"{how}, |m in 8 bits / in 16 - 1|", abs(eight / whole - 1), "<=", MEMORY),
            Gate(f"{how}, m in 2 bits - m in 16", two - whole, ">=", 0.0),
            Gate(f"{how}, m in 2 bits / DirectQ", two / direct, "<", 1.0),
        ]
    return found


def changes_gates(runs: Runs) -> list[Gate]:
    """The largest |a - m| / |a| of an epoch from the second visit on.

    Of all runs whose model was trained on text before, and whose m has 8 bits or more: fewer bits make changes by themselves,
    and so does a model from scratch: first epochs change it.
    """
    ratios = [
        ratio
        for name, of_name in runs.items()
        for run in of_name
        if run["configuration"].pretrain and not name.endswith("m in 2 bits")
        for ratio in run["changes"]
        if ratio is not None
    ]
    if not ratios:
        return []
    return [Gate("|a - m| / |a| from the second visit on, largest of an epoch", max(ratios), "<", CHANGES)]


def cache_gates(runs: Runs) -> list[Gate]:
    """Boundaries whose two sides do not remember the same bits at the end of a run, of all runs."""
    differ = sum(run["boundaries_that_differ"] for of_name in runs.values() for run in of_name)
    return [Gate("boundaries whose two caches differ at the end, all runs", differ, "==", 0)]
