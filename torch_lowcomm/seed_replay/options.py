"""Checks the options of lc.SeedReplay that the core does not check itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.distributed as dist

from torch_lowcomm.seed_replay.estimators import ESTIMATORS

_MOST_SAMPLES = 65535  # in a message


def most_samples(samples: int | None, seconds: float | None) -> int:
    """Returns the most directions that a machine takes in an iteration; with `seconds`, as many as a message has room for."""
    if samples is not None:
        return samples
    return 1 if seconds is None else _MOST_SAMPLES


def expect_numbers(
    *, lr: float, eps: float, seconds: float | None, weight_decay: float, least: dict[str, tuple[int, int]]
) -> None:
    """Checks that numbers are finite and integers large enough.

    Args:
        lr: A number above 0.
        eps: A number above 0.
        seconds: A number above 0, or None.
        weight_decay: 0 or more.
        least: By name, an integer and its least value; among them "samples".

    Raises:
        ValueError: One of them is wrong.
    """
    for name, value in (("lr", lr), ("eps", eps), ("seconds", seconds)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"SeedReplay: {name}: expected a finite number above 0, got {value!r}")
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise ValueError(f"SeedReplay: weight_decay: expected a finite number, 0 or more, got {weight_decay!r}")
    for name, (count, at_least) in least.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < at_least:
            raise ValueError(f"SeedReplay: {name}: expected an integer of {at_least} or more, got {count!r}")
    if least["samples"][0] > _MOST_SAMPLES:
        raise ValueError(f"SeedReplay: samples: expected {_MOST_SAMPLES} or fewer, got {least['samples'][0]}")


def expect_ways(
    *, estimator: str, samples: int, perturb: str, base: str | None, weight_decay: float, sharded: bool
) -> None:
    """Checks that names exist and go together.

    Raises:
        ValueError: They do not.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"SeedReplay: estimator: expected one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    if estimator == "one-sided" and samples < 2:
        raise ValueError("SeedReplay: estimator 'one-sided': expected samples=2 or more, got 1: there is no deviation")
    if perturb not in ("at-use", "in-place"):
        raise ValueError(f"SeedReplay: perturb: expected at-use or in-place, got {perturb!r}")
    if base is not None and weight_decay:
        raise ValueError(
            f"SeedReplay: weight_decay: expected 0 with base {base!r}, which is never written, got {weight_decay}"
        )
    if base is not None and perturb == "in-place":
        raise ValueError(f"SeedReplay: perturb 'in-place': expected no base, which is never written, got {base!r}")
    if base is not None and sharded:
        raise ValueError(
            f"SeedReplay: base {base!r}: expected a model that is not sharded, as FSDP2 gathers the weights that a base takes "
            "the place of, got DTensors"
        )


def expect_meeting(
    *, group: dist.ProcessGroup | None, store: object, machine_id: object, exchange: object, ranks: Sequence[int]
) -> str:
    """Checks that there is one way to meet other machines, and returns its name.

    Args:
        group: The group of machines, if there is one.
        store: A store, if there is one.
        machine_id: This machine's id at the store.
        exchange: Another way, if there is one.
        ranks: Global ranks of this machine.

    Raises:
        ValueError: There is more than one way, a part of one, or the group has another rank of this machine.
    """
    ways = {"group": group, "store": store, "exchange": exchange}
    given = [name for name, way in ways.items() if way is not None]
    if len(given) > 1:
        raise ValueError("SeedReplay: expected one of group, store and exchange, got more")
    if (store is None) != (machine_id is None):
        got = "machine_id alone" if store is None else "store alone"
        raise ValueError(f"SeedReplay: expected store and machine_id, got {got}")
    if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
        others = sorted(set(dist.get_process_group_ranks(group)) & set(ranks) - {dist.get_rank()})
        if others:
            raise ValueError(
                f"SeedReplay: group: expected one rank of each machine, got ranks {others} of this one too, whose parameters are "
                "sharded together"
            )
    return f"{given[0]} {machine_id}" if given else "alone"
