"""AQ-SGD in two replicas of a pipeline, whose averages are exact or coded: losses, and how many of all bytes are coded."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import launch
from report import Gate

from convergence import flattery
from convergence.pipeline import gates as pipeline_gates
from convergence.pipeline import replicas_rank
from convergence.pipeline.presets import GAUSS, shortened
from convergence.pipeline.replicas_rank import ReplicasConfiguration
from convergence.pipeline.runs import changes, curve

RUN_S = 400  # deadline of one run
MOVED = "AQ gauss2/gauss4, global"
TOGETHER = 4  # runs that the same processes do, and that `--runs` keeps together
# The paper's end-to-end compression (section 4.3): 3 bits forward, 6 backward, 4 of the parameters' gradients.
END_TO_END = ("gauss3", "gauss6")


def coded(codecs: tuple[str, str] = GAUSS, *, store: str = "fp16", **others: Any) -> ReplicasConfiguration:
    """AQ-SGD of presets.py in two replicas; without a store DirectQ."""
    return ReplicasConfiguration(codecs=dict(zip(("forward", "backward"), codecs, strict=True)), store=store, **others)


PRESETS = {
    "exact": ReplicasConfiguration(),
    "AQ gauss2/gauss4": coded(),
    "AQ gauss2/gauss4, QuantizedAdam": coded(optimizer="quantized_adam"),
    "exact, QuantizedAdam": ReplicasConfiguration(optimizer="quantized_adam"),
    "AQ gauss2/gauss4, DiLoCoX": coded(optimizer="diloco"),
    "exact, global": ReplicasConfiguration(shuffle="global"),
    MOVED: coded(shuffle="global"),
    "exact, paper's QuantizedAdam": ReplicasConfiguration(optimizer="paper_adam"),
    **{
        f"{way} gauss3/gauss6, {name}": coded(END_TO_END, store=store, optimizer=optimizer)
        for name, optimizer in (("QuantizedAdam", "quantized_adam"), ("paper's QuantizedAdam", "paper_adam"))
        for way, store in (("AQ", "fp16"), ("DirectQ", ""))
    },
    "exact, DiLoCoX": ReplicasConfiguration(optimizer="diloco"),
}
KINDS = ("forward", "backward", "announcements", "replicas", "other")


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything, and prints a row a run.

    Args:
        quick: Fewer samples and epochs, and the first four runs.
        seeds: Of all runs.

    Returns:
        `configurations` and `curves` for the JSON, and the gates.
    """
    print(
        f"# {'':<45}{'':>4}{'loss (nats a byte)':^30}{'bits an element':>17}{'bits a':>11}{'MB':>8}{'':>8}{'|a-m| /':>9}"
    )
    print(
        f"# {'run':<45}{'seed':>4}{'training':>10}{'samples':>10}{'validation':>12}{'forward':>9}{'backward':>9}"
        f"{'parameter':>11}{'sent':>8}{'coded':>8}{'|a|':>8}{'seconds':>9}"
    )
    presets = dict(itertools.islice(PRESETS.items(), 4)) if quick else PRESETS
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        for names in (list(presets)[i : i + TOGETHER] for i in range(0, len(presets), TOGETHER)):
            some = [
                dataclasses.replace(shortened(presets[name]) if quick else presets[name], seed=seed) for name in names
            ]
            returned = launch.run(
                replicas_rank.train,
                ranks=some[0].replicas * some[0].stages,
                deadline_s=240 + RUN_S * len(some),
                configurations=some,
            )
            for name, c, *ranks in zip(names, some, *returned, strict=True):
                run = {"name": name, "seed": seed, **summary(c, ranks)}
                print(row(run), flush=True)
                runs.setdefault(name, []).append(run)
    pipeline_gates.print_ratios(runs)
    return {
        "configurations": {name: dataclasses.asdict(of_name[0]["configuration"]) for name, of_name in runs.items()},
        "curves": [curve(run) for of_name in runs.values() for run in of_name],
    }, [
        flattery.gate(runs, lambda name: pipeline_gates.baseline(name, runs)),
        *pipeline_gates.cache_gates(runs),
    ]


def summary(c: ReplicasConfiguration, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks of one run measured; ranks are those of replica 0 in the order of their stages, then of replica 1."""
    replicas = [ranks[i : i + c.stages] for i in range(0, len(ranks), c.stages)]
    lasts = [stages[-1] for stages in replicas]
    sent = [[rank["sent"][epoch] for rank in ranks] for epoch in range(len(ranks[0]["sent"]))]
    total = {kind: sum(rank[kind] for epoch in sent for rank in epoch) for kind in (*KINDS, "exact")}
    values = sum(total[kind] for kind in KINDS if kind != "announcements")
    steps = c.epochs * c.epoch_steps
    bits = 8 / (ranks[0]["elements"] * c.replicas * (c.stages - 1))
    return {
        "configuration": c,
        **{name: lasts[0][name] for name in ("samples", "validation", "validations", "accuracy", "seconds")},
        "loss": [statistics.mean(of_epoch) for of_epoch in zip(*(last["loss"] for last in lasts), strict=True)],
        "bytes": list(itertools.accumulate(sum(rank[kind] for rank in epoch for kind in KINDS) for epoch in sent)),
        **{f"{kind}_bits": total[kind] * bits for kind in ("forward", "backward", "announcements")},
        "replicas_bits": total["replicas"] * 8 / (c.replicas * steps * sum(rank["parameters"] for rank in replicas[0])),
        "coded": 1 - total["exact"] / values,
        "changes": [changes(epoch) for epoch in sent],
        "cache_bytes": sum(rank["cache_bytes"] for rank in ranks),
        "boundaries_that_differ": sum(
            a["caches"].get("sent") != b["caches"].get("received")
            for stages in replicas
            for a, b in itertools.pairwise(stages)
        ),
    }


def row(run: dict[str, Any]) -> str:
    """The row of a run."""
    ratio = run["changes"][-1]
    return (
        f"  {run['name']:<45}{run['seed']:>4}{run['loss'][-1]:>10.4f}{run['samples']:>10.4f}{run['validation']:>12.4f}"
        f"{run['forward_bits']:>9.3f}{run['backward_bits']:>9.3f}{run['replicas_bits']:>11.3f}{run['bytes'][-1] / 1e6:>8.1f}"
        f"{run['coded']:>8.4f}{'-' if ratio is None else f'{ratio:.3f}':>8}{run['seconds'][-1]:>9.1f}"
    )
