"""Performs stages, each on two fresh ranks with a deadline of its own."""

import importlib
import time

import ranks

from gpu_check.stages import TRAININGS

RANKS = 2
DEADLINE_S = 150.0

# NCCL refuses two ranks on one device; names of hosts need not resolve where there is no network.
ON_ONE_GPU = {"LOWCOMM_NCCL": "0", "GLOO_SOCKET_IFNAME": "lo"}
WITHOUT_A_GPU = {**ON_ONE_GPU, "CUDA_VISIBLE_DEVICES": ""}


def on_this_rank(rank, name, device):
    """A stage's part on one rank: its facts, or None."""
    from gpu_check.trial import Trial

    trial = Trial(rank, device)
    if name in TRAININGS:
        trainings = importlib.import_module("device_trainings")
        trial.init()
        facts = trial.compare(*(getattr(trainings, training) for training in TRAININGS[name]))
    else:
        facts = getattr(importlib.import_module(f"gpu_check.stages.{name}"), name)(trial)
    trial.end()
    return facts


def perform(name, device, *, deadline_s=DEADLINE_S):
    """One stage's facts of rank 0; raises ranks.RanksFailed with what every rank said.

    Ranks of the dry run are forks, which cost milliseconds. A fork cannot use CUDA once its parent has; fresh
    interpreters can.
    """
    cuda = device == "cuda"
    return ranks.run_ranks(
        on_this_rank,
        RANKS,
        name,
        device,
        timeout=deadline_s,
        start="spawn" if cuda else "fork",
        env=ON_ONE_GPU if cuda else WITHOUT_A_GPU,
    )[0]


def train(run, device, seconds):
    """A run of gpu_check/training.py: rank 0's facts; raises ranks.RanksFailed."""
    from gpu_check import training

    env = ON_ONE_GPU if device == "cuda" else WITHOUT_A_GPU
    return ranks.run_ranks(
        training.on_this_rank, RANKS, run, device, seconds, timeout=seconds + 120, start="spawn", env=env
    )[0]


def perform_all(names, device, *, deadline_s):
    """{stage: {ok, seconds, facts or why}} of stages one after another; a failing one but
    `info` keeps none from being performed."""
    end = time.monotonic() + deadline_s
    results = {}
    for name in names:
        start = time.monotonic()
        try:
            facts = perform(name, device, deadline_s=max(1.0, min(DEADLINE_S, end - start)))
            results[name] = {"ok": True, "facts": facts}
        except ranks.RanksFailed as why:
            results[name] = {"ok": False, "why": str(why)}
            if name == "info":  # no GPU, or no kernels for it: every other stage would take its seconds to say so
                break
        results[name]["seconds"] = round(time.monotonic() - start, 1)
        print(
            f"  {'pass' if results[name]['ok'] else 'FAIL'}  {name:10s} {results[name]['seconds']:6.1f} s", flush=True
        )
    return results
