"""Seed replay: loss, and the bytes of each machine, next to methods that send tensors; four real processes over loopback.

The runs are those of presets.py on the task of task.py. The runs of a seed follow one another in the
same processes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import launch
from report import Gate

from convergence.seed_replay import gates as seed_replay_gates
from convergence.seed_replay import rank as seed_replay_rank
from convergence.seed_replay import serial as seed_replay_serial
from convergence.seed_replay.presets import PRESETS, QUICK
from convergence.seed_replay.rank import Configuration


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run.

    Args:
        quick: A quarter of the iterations, a few runs, and looser bounds on losses.
        seeds: Of all runs.

    Returns:
        `configurations` and `curves` for the JSON, and the gates.
    """
    presets = {name: shortened(PRESETS[name]) for name in QUICK} if quick else PRESETS
    print_heading()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in presets}
    for seed in range(seeds):
        for name, run in of_seed(presets, seed):
            runs[name].append(run)
    (alone,) = launch.run(
        seed_replay_serial.train, ranks=1, deadline_s=120, configuration=dataclasses.replace(presets["byte"], seed=0)
    )
    serial = {"machines": [alone]}
    curves = [curve(name, run) for name, of_name in runs.items() for run in of_name]
    return {
        "configurations": {name: dataclasses.asdict(c) for name, c in presets.items()},
        "curves": curves,
    }, seed_replay_gates.gates(runs, serial, quick=quick)


def print_heading() -> None:
    """Prints the heading of the rows of `of_seed`."""
    print(f"# {'run':<24}{'seed':>5}{'loss':>9}{'gradients':>11}{'payload, B':>12}{'sent, kB':>11}{'seconds':>9}")


def shortened(configuration: Configuration) -> Configuration:
    """A quarter of the iterations."""
    return dataclasses.replace(configuration, iterations=configuration.iterations // 4)


def of_seed(presets: dict[str, Configuration], seed: int) -> list[tuple[str, dict[str, Any]]]:
    """All runs of a seed, in fresh processes that do one after another."""
    configurations = [dataclasses.replace(c, seed=seed) for c in presets.values()]
    machines = configurations[0].machines
    returned = launch.run(
        seed_replay_rank.train, ranks=machines, deadline_s=60 + 120 * len(presets), configurations=configurations
    )
    runs = []
    for name, c, *of_machines in zip(presets, configurations, *returned, strict=True):
        run = {"configuration": c, "machines": of_machines}
        print(row(name, run), flush=True)
        runs.append((name, run))
    return runs


def row(name: str, run: dict[str, Any]) -> str:
    """Returns the row of a run; payload and bytes sent are means over machines."""
    machines = run["machines"]
    payload, sent = (sum(values) / len(machines) for values in zip(*map(bytes_of, machines), strict=True))
    first = machines[0]
    return (
        f"  {name:<24}{run['configuration'].seed:>5}{first['loss'][-1]:>9.4f}{first['gradients']:>11}"
        f"{payload:>12.0f}{sent / 1e3:>11.1f}{first['seconds'][-1]:>9.1f}"
    )


def bytes_of(machine: dict[str, Any]) -> tuple[int, int]:
    """Payload received and bytes sent."""
    return machine["payload"], machine["bytes"][-1]


def curve(name: str, run: dict[str, Any]) -> dict[str, Any]:
    """Returns a run as the JSON has it: the first machine's."""
    c, first = run["configuration"], run["machines"][0]
    return {
        "name": name,
        "seed": c.seed,
        "gradients": first["gradients"],
        "payload": first["payload"],
        "step": first["iteration"],
        "bytes": first["bytes"],
        "seconds": [round(seconds, 3) for seconds in first["seconds"]],
        "loss": [round(loss, 6) for loss in first["loss"]],
    }
