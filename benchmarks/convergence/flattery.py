"""Training losses that flatter: a model may learn to read the rounding of its own messages, and is worth little without it.

Where a code lets a token's rounding depend on later tokens, training goes better than with exact messages and the trained
weights are worse. So all rows of pipelines show both losses, and this gate compares them with exact training's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from report import Gate

Run = Mapping[str, Any]
Runs = Mapping[str, Sequence[Run]]  # by name, a seed each
MOST = 1.02  # validation by exact messages / exact training's


def last(run: Run) -> float:
    """The training loss at the end of a run, by its own messages."""
    return float(run["loss"][-1])


def ratio(of: Callable[[Run], float], runs: Sequence[Run], exact: Sequence[Run]) -> float:
    """A loss over that of exact training, the mean over paired seeds."""
    return statistics.mean(of(a) / of(b) for a, b in zip(runs, exact, strict=False))


def gate(runs: Runs, exact_of: Callable[[str], str], training: Callable[[Run], float] = last) -> Gate:
    """Counts runs that train no worse than with exact messages and validate, by exact ones, more than 2 % worse on text that is
    not trained on. `exact_of` has the name of the run with exact messages that is otherwise as a run; `training` a run's loss.
    """
    flattered = 0
    for name, of_name in runs.items():
        exact = runs.get(exact_of(name))
        if not exact or exact is of_name:
            continue
        trained, validated = ratio(training, of_name, exact), ratio(lambda run: run["validation"], of_name, exact)
        if trained <= 1 and validated > MOST:
            flattered += 1
            print(f"# {name} reads its messages' rounding: training {trained:.4f} of exact, validation {validated:.4f}")
    return Gate("runs that train as exact ones do and validate > 2 % worse", flattered, "==", 0)
