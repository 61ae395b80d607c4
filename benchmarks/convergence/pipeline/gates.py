"""The bounds of the runs of `convergence aq`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from report import Gate

from convergence import flattery
from convergence.pipeline import tasks

Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # by name, a seed each
# How a run's loss is taken: while it trained, by its own messages; of its trained weights, by exact messages.
LOSSES = ("training loss", "exact loss of the samples")
# A run's distance from exact training over that of DirectQ: (run, DirectQ, bound).
GAPS = (
    ("AQ sym2/sym8", "DirectQ sym2/sym8", 0.10),
    ("AQ gauss2/gauss4", "DirectQ gauss2/gauss4", 0.10),
    ("AQ gauss1/gauss4", "DirectQ gauss2/gauss4", 0.25),  # DirectQ with one bit more
)
RATIO = 1.006  # of AQ gauss2/gauss4 to exact training
# The second bound was 4.1 when a scale served four tokens of this width: a token's own takes 0.125 bits an element.
FORWARD_BITS, BACKWARD_BITS = 2.7, 4.2
CHANGES = 0.3
MEMORY = 0.003  # of m in 8 bits to m in 16
STAGES = (2, 4, 8)
# Validation by exact messages over exact training's, of what README and the pages recommend.
VALIDATION = 1.02
RECOMMENDED = (
    "AQ gauss2/gauss4, fine-tuning",
    "AQ gauss4/gauss4, fine-tuning",
    "DirectQ gauss4/gauss4, fresh",
    "DirectQ gauss4/gauss4, width 576",
    "DirectQ minmax4/minmax4, width 576",
    "AQ gauss2/gauss4, width 576, again",
)


def gates(runs: Runs, *, quick: bool) -> list[Gate]:
    """Those whose runs are there.

    With `quick` the gaps are of the training loss alone and have twice the bound: exact losses have not parted yet.
    """
    compared = [
        gap_gate(runs, how, run, direct, 2 * bound if quick else bound)
        for run, direct, bound in GAPS
        if {"exact", run, direct} <= runs.keys()
        for how in (LOSSES[:1] if quick else LOSSES)
    ]
    print_ratios(runs)
    # A class is no later token that a rounding could tell of.
    on_text = {name: of_name for name, of_name in runs.items() if of_name[0]["configuration"].task == tasks.TEXT}
    return [
        flattery.gate(on_text, lambda name: baseline(name, runs)),
        *validation_gates(runs),
        *compared,
        *preset_gates(runs, quick=quick),
        *memory_gates(runs),
        *stages_gates(runs),
        *changes_gates(runs),
        *cache_gates(runs),
    ]


def loss(run: Mapping[str, Any], how: str) -> float:
    """Nats a byte."""
    return flattery.last(run) if how == LOSSES[0] else run["samples"]


def baseline(name: str, runs: Runs | Mapping[str, Any]) -> str:
    """The run with exact messages that is otherwise as that one: "AQ …, noise" has "exact, noise"."""
    exact = ", ".join(["exact", *name.split(", ")[1:]])
    return exact if exact in runs else "exact"


def print_ratios(runs: Runs) -> None:
    """Prints a line for each run: its losses over those of exact messages, means over paired seeds with their deviations."""
    print(f"# {'loss / with exact messages':<45}{'training':>18}{'samples':>18}{'validation':>18}{'accuracy':>18}")
    for name, of_name in runs.items():
        exact = runs.get(baseline(name, runs))
        if not exact:
            continue
        pairs = list(zip(of_name, exact, strict=False))
        cells = [
            spread([of(run) / of(other) for run, other in pairs])
            for of in (flattery.last, lambda run: run["samples"], lambda run: run["validation"])
        ]
        cells.append(spread([run["accuracy"] for run in of_name]))
        print(f"#   {name:<43}" + "".join(f"{cell:>18}" for cell in cells))


def spread(values: Sequence[float]) -> str:
    """The mean over seeds, and their standard deviation where there are several."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def validation_gates(runs: Runs) -> list[Gate]:
    """What is recommended validates as exact training does, with every number of stages."""
    return [
        Gate(
            f"validation, {name} / exact",
            flattery.ratio(lambda run: run["validation"], of_name, exact),
            "<=",
            VALIDATION,
        )
        for name, of_name in runs.items()
        if name.startswith(RECOMMENDED) and (exact := runs.get(baseline(name, runs)))
    ]


def stages_gates(runs: Runs) -> list[Gate]:
    """DirectQ's distance from exact training grows with the stages, of the first seed."""
    names = [f"DirectQ gauss2/gauss4{'' if count == 4 else f', {count} stages'}" for count in STAGES]
    if not {"exact", *names} <= runs.keys():
        return []
    gaps = [loss(runs[name][0], LOSSES[0]) - loss(runs["exact"][0], LOSSES[0]) for name in names]
    print(f"# DirectQ gauss2/gauss4 - exact at {STAGES} stages, {LOSSES[0]}: {', '.join(f'{gap:.4f}' for gap in gaps)}")
    return [
        Gate(f"DirectQ gauss2/gauss4 - exact, {more} stages / {less}", large / small, ">", 1.0)
        for (less, small), (more, large) in itertools.pairwise(zip(STAGES, gaps, strict=True))
    ]


def gap_gate(runs: Runs, how: str, name: str, direct: str, bound: float) -> Gate:
    """(AQ - exact) / (DirectQ - exact), of means over paired seeds."""
    ours, theirs = (
        [loss(run, how) - loss(exact, how) for run, exact in zip(runs[of], runs["exact"], strict=True)]
        for of in (name, direct)
    )
    by_seed = ", ".join(f"{a:.4f} and {b:.4f}" for a, b in zip(ours, theirs, strict=True))
    print(f"# {how} - exact's, {name} and {direct}: {by_seed}")
    value = statistics.mean(ours) / statistics.mean(theirs)
    return Gate(f"{how}, ({name} - exact) / ({direct} - exact)", value, "<=", bound)


def preset_gates(runs: Runs, *, quick: bool) -> list[Gate]:
    """Loss and bits of AQ gauss2/gauss4 with first visits in 8 bits."""
    name = "AQ gauss2/gauss4"
    if not {"exact", name} <= runs.keys():
        return []
    found = []
    for how in LOSSES:
        ratios = [loss(run, how) / loss(exact, how) for run, exact in zip(runs[name], runs["exact"], strict=True)]
        print(f"# {how}, {name} / exact: {', '.join(f'{ratio:.4f}' for ratio in ratios)}")
        found.append(Gate(f"{how}, {name} / exact", statistics.mean(ratios), "<=", 1.03 if quick else RATIO))
    # A first visit is a larger share of a quick run's visits.
    epochs = runs[name][0]["configuration"].epochs
    forward = FORWARD_BITS if not quick else (8.5 + (epochs - 1) * 2.2) / epochs
    bits = [max(run[f"{way}_bits"] for run in runs[name]) for way in ("forward", "backward")]
    return [
        *found,
        Gate(f"bits an element forward, all visits, {name}", bits[0], "<=", forward),
        Gate(f"bits an element backward, all visits, {name}", bits[1], "<=", BACKWARD_BITS),
    ]


def memory_gates(runs: Runs) -> list[Gate]:
    """A memory of 8 bits has the loss of one of 16; with 2 bits the loss is between that and DirectQ's."""
    names = ("AQ gauss2/gauss4", *(f"AQ gauss2/gauss4, m in {bits} bits" for bits in (8, 2)), "DirectQ gauss2/gauss4")
    if not set(names) <= runs.keys():
        return []
    found = []
    for how in LOSSES:
        whole, eight, two, direct = (statistics.mean(loss(run, how) for run in runs[name]) for name in names)
        found += [
            Gate(f"{how}, |m in 8 bits / in 16 - 1|", abs(eight / whole - 1), "<=", MEMORY),
            Gate(f"{how}, m in 2 bits - m in 16", two - whole, ">=", 0.0),
            Gate(f"{how}, m in 2 bits / DirectQ", two / direct, "<", 1.0),
        ]
    return found


def changes_gates(runs: Runs) -> list[Gate]:
    """The largest |a - m| / |a| of an epoch from the second visit on.

    Of all runs whose samples come back as they were, whose model was trained on text before, and whose m has 8 bits or more:
    fewer bits make changes by themselves, and so does a model from scratch, or one that learns classes: first epochs change it.
    """
    ratios = [
        ratio
        for name, of_name in runs.items()
        for run in of_name
        if not run["configuration"].noise
        and run["configuration"].pretrain
        and run["configuration"].task == tasks.TEXT
        and not name.endswith(("m in 2 bits", "m in gauss2"))
        for ratio in run["changes"]
        if ratio is not None
    ]
    return (
        [Gate("|a - m| / |a| from the second visit on, largest of an epoch", max(ratios), "<", CHANGES)]
        if ratios
        else []
    )


def cache_gates(runs: Runs) -> list[Gate]:
    """Boundaries whose two sides do not remember the same bits at the end of a run, of all runs."""
    differ = sum(run["boundaries_that_differ"] for of_name in runs.values() for run in of_name)
    return [Gate("boundaries whose two caches differ at the end, all runs", differ, "==", 0)]
