"""The options of lc.SeedReplay: names, defaults and meanings in one table, and the checks that the core does not make."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch_lowcomm._option_table import OptionTable, at_least, option
from torch_lowcomm.seed_replay.estimators import ESTIMATORS

_MOST_SAMPLES = 65535  # in a message
_POSITIVE: tuple[str, Callable[[Any], bool]] = (
    "a finite number above 0",
    lambda value: value > 0 and math.isfinite(value),
)


@dataclasses.dataclass(frozen=True)
class SeedReplayOptions(OptionTable):
    """How a run measures and steps. `SeedReplay` takes these fields as keyword arguments.

    Machines compare noise, codec, lr_scale, pool, base, seed and check_every; the ranks of one machine compare all.

    Attributes:
        eps: ε, how far along a direction the loss is measured.
        samples: n, the number of directions of a machine in an iteration; with `seconds` the most.
        seconds: Time for which every iteration takes directions; it takes at least one.
        weight_decay: θ ← θ·(1 − lr·weight_decay) of parameters with two dimensions or more.
        noise: "rademacher", ±1, or "gaussian".
        codec: Codec of estimates: "logbyte" (sign and rounded logarithm in a byte), "log9", "sign1", "fp16", "none".
        lr_scale: "sqrt", the paper's, with which the step is η/√k; or "mean", η/k.
        estimator: "two-sided" (2 evaluations a sample), "one-sided" (1, and 1 an iteration; divided by the losses' standard
            deviation, FZOO).
        pool: Number K of fixed directions to take from (FedKSeed, arXiv 2312.06353); 0: each direction is new.
        base: "int8" or "nf4": keep the weights quantized, in blocks of 64, and never write them. Their change is kept as the
            pool's K sums (needs `pool`, noise "rademacher", and no weight decay). The parameters' own memory is given up.
            Every use of a weight makes the K directions again, so a step's time grows with K.
        perturb: "at-use": each layer's weights when it reads them, in a separate tensor. "in-place": the weights themselves,
            with a copy that puts them right every `restore_every` iterations, for models that a compiler has traced.
        restore_every: n_b of "in-place".
        seed: Seed of the run.
        check_every: Iterations between comparisons of checksums; 0 for never.
        snapshot_every: Iterations from one snapshot of `checkpoint` to the next.
    """

    owner: ClassVar[str] = "SeedReplay"
    arguments: ClassVar[tuple[str, ...]] = ("lr", "group", "store", "machine_id", "exchange", "checkpoint")
    symbols: ClassVar[Mapping[str, str]] = {"learning_rate": "lr"}

    eps: float = option(1e-3, *_POSITIVE)
    samples: int | None = at_least(None, 1)
    seconds: float | None = option(None, *_POSITIVE)
    weight_decay: float = option(0.0, "a finite number, 0 or more", lambda value: value >= 0 and math.isfinite(value))
    noise: str = "rademacher"
    codec: str = "logbyte"
    lr_scale: str = "sqrt"
    estimator: str = option("two-sided", f"one of {', '.join(ESTIMATORS)}", ESTIMATORS.__contains__)
    pool: int = at_least(0, 0)
    base: str | None = None
    perturb: str = option("at-use", "at-use or in-place", ("at-use", "in-place").__contains__)
    restore_every: int = at_least(1, 1)
    seed: int = at_least(0, 0)
    check_every: int = at_least(100, 0)
    snapshot_every: int = at_least(1000, 1)

    @property
    def most_samples(self) -> int:
        """The most directions that a machine takes in an iteration; with `seconds`, as many as a message has room for."""
        if self.samples is not None:
            return self.samples
        return 1 if self.seconds is None else _MOST_SAMPLES

    def for_core(self) -> dict[str, Any]:
        """Returns these options as `_C.SeedReplay` takes them; that class checks their values."""
        options = {name: getattr(self, name) for name in ("noise", "codec", "lr_scale", "seed", "pool")}
        return {**options, "base": self.base or "", "agreed": f"check_every={self.check_every}"}

    def of_machine(self) -> str:
        """Returns the text of what the ranks of one machine have in common; rates are compared at every step."""
        told = {**vars(self), "samples": self.most_samples}
        return " ".join(f"{name}={value}" for name, value in told.items() if name != "weight_decay")

    def expect(self, lr: float) -> None:
        """Raises ValueError where a number or a name is wrong, or two options do not go together."""
        words, holds = _POSITIVE
        if not holds(lr):
            raise ValueError(f"SeedReplay: lr: expected {words}, got {lr!r}")
        self.expect_in_range()
        if self.most_samples > _MOST_SAMPLES:
            raise ValueError(f"SeedReplay: samples: expected {_MOST_SAMPLES} or fewer, got {self.most_samples}")
        if self.estimator == "one-sided" and self.most_samples < 2:
            raise ValueError(
                "SeedReplay: estimator 'one-sided': expected samples=2 or more, got 1: there is no deviation"
            )
        if self.base is not None and self.weight_decay:
            raise ValueError(
                f"SeedReplay: weight_decay: expected 0 with base {self.base!r}, which is never written, got {self.weight_decay}"
            )
        if self.base is not None and self.perturb == "in-place":
            raise ValueError(
                f"SeedReplay: perturb 'in-place': expected no base, which is never written, got {self.base!r}"
            )
