"""The runs of `convergence seed_replay` by name: the byte and other codecs, variants of the method, and baselines."""

from __future__ import annotations

from typing import Any

from convergence.seed_replay.rank import Configuration


def replay(lr: float = 0.01, eps: float = 1e-3, **options: Any) -> Configuration:
    """Seed replay with those options of lc.SeedReplay."""
    return Configuration(lr=lr, eps=eps, options=options)


FEWER = 160  # iterations of back-propagation: 2.5 times fewer gradients than 400 of forward ones
# η/√16 over 16 estimates is .04 of their mean; in 160 steps of .1 gradient descent goes as far as in 400 of .04.
SAME = 0.1

PRESETS: dict[str, Configuration] = {
    "float": replay(codec="none"),
    "fp16": replay(codec="fp16"),
    "log9": replay(codec="log9"),
    "byte": replay(),
    "sign": replay(codec="sign1"),
    "Gaussian": replay(noise="gaussian"),
    "mean scaling": replay(0.04, lr_scale="mean"),
    "in place": replay(perturb="in-place", restore_every=16),
    "one-sided (FZOO)": replay(estimator="one-sided"),
    # Both compare losses that differ by more than the perturbation makes them: longer ones, found on seed 0.
    "mistakes": Configuration(lr=0.03, eps=0.1, objective="mistakes"),
    "pool of 1024 seeds": replay(pool=1024),
    "pool of 64 seeds": replay(pool=64),
    "best η": replay(0.06),
    "send_full_grad": Configuration("full gradient"),
    "DDP": Configuration("back-propagation", lr=SAME, iterations=FEWER),
    "DDP, best rate": Configuration("back-propagation", lr=2.0, iterations=FEWER),
    "FedAvg": Configuration("averaging", lr=SAME / 4, iterations=FEWER),
    "tuned, byte": Configuration(tune=True),
    "tuned, DDP": Configuration("back-propagation", lr=SAME, iterations=FEWER, tune=True),
    "tuned, byte, best η": Configuration(tune=True, lr=0.1),
    "tuned, DDP, best rate": Configuration("back-propagation", lr=4.0, iterations=FEWER, tune=True),
}
QUICK = ("float", "log9", "byte", "sign", "send_full_grad", "DDP", "tuned, byte", "tuned, DDP")
