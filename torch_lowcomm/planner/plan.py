"""`lc.plan`: compares the ways to train a model over a link, as a table, and applies one of them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torch_lowcomm._all_gather_json import all_gather_json
from torch_lowcomm._table import aligned
from torch_lowcomm.planner import apply, loss
from torch_lowcomm.planner.link import Link
from torch_lowcomm.planner.measure import Loss, measure
from torch_lowcomm.planner.training import Training
from torch_lowcomm.planner.ways import Way, all_ways

_HEADS = "way|s a step|GB a day|GB a rank|loss|range|tokens|net speed|"
_WORTH, _SHORT = 1.05, 1.1  # a gain that is worth a code; a step of exact DDP that hardly waits


@dataclasses.dataclass(frozen=True)
class Plan:
    """The ways to train, of which `best` is recommended; `print` shows them as a table.

    Attributes:
        training: The model, and a step of it without communication.
        link: The sites and their links.
        ways: All ways, exact DDP first.
        max_loss: The largest factor on the loss that `best` may have.
        memory: Bytes that a rank has for parameters, gradients and the optimizer.
        total_tokens: Of the whole training, by which a factor on the loss becomes tokens.
    """

    training: Training
    link: Link
    ways: Sequence[Way]
    max_loss: float
    memory: float
    total_tokens: float

    def tokens(self, way: Way) -> float:
        """How many times the tokens a way needs to come to the loss of exact training; infinity where it cannot."""
        return loss.tokens(way.loss.value, self.training.parameters, self.total_tokens)

    def speed(self, way: Way) -> float:
        """How many times as fast as exact DDP a way comes to the same loss."""
        return self.ways[0].step_s / (way.step_s * self.tokens(way))

    def fits(self, way: Way) -> bool:
        """Whether a way has a known loss within `max_loss`, and its memory."""
        return way.loss.value <= self.max_loss and way.memory <= self.memory

    @property
    def best(self) -> Way:
        """The fastest way that fits, or the first exact one to which it gains less than 5 %; a ValueError where none fits."""
        fitting = [way for way in self.ways if self.fits(way)]
        if not fitting:
            least = min((w for w in self.ways if w.loss.value <= self.max_loss), key=lambda way: way.memory)
            raise ValueError(f"plan: expected {least.memory:.3g} bytes a rank for {least.name}, got {self.memory:.3g}")
        fastest = max(fitting, key=self.speed)
        near = [way for way in fitting if way.loss is loss.EXACT and _WORTH * self.speed(way) >= self.speed(fastest)]
        return near[0] if near else fastest

    def __str__(self) -> str:
        best, sources = self.best, list(dict.fromkeys((way.loss.kind, way.loss.source) for way in self.ways))
        ways = sorted(self.ways, key=self.speed, reverse=True)
        lines = aligned(_HEADS, [self._row(way, best, sources) for way in ways])
        lines += [f"[{number}] {kind}: {source}" for number, (kind, source) in enumerate(sources, 1)]
        codings = self.training.codings.items()
        if errors := [f"{name} {coding.error:.2g}" for name, coding in codings if coding.error is not None]:
            lines.append(f"error of codecs on the model's gradients: {', '.join(errors)}")
        return "\n".join([*lines, "", *self._advice(best)])

    def _row(self, way: Way, best: Way, sources: list[tuple[str, str]]) -> tuple[str, ...]:
        of = way.loss
        known = not math.isnan(of.value)
        return (
            ("> " if way is best else "  ") + way.name + ("" if way.memory <= self.memory else " (memory)"),
            f"{way.step_s:.3g}",
            f"{way.sent / way.step_s * 86400 / 1e9:.3g}",
            f"{way.memory / 1e9:.3g}",
            f"{of.value:.3f}" if known else "-",
            f"{of.low:.3f} - {of.high:.3f}" if known else "-",
            f"{self.tokens(way):.2f}" if known else "-",
            f"{self.speed(way):.3g}" if known else "-",
            f"[{sources.index((of.kind, of.source)) + 1}]",
        )

    def _advice(self, best: Way) -> list[str]:
        exact = self.ways[0]
        why = f"a step of {exact.name} waits {max(0.0, 1 - self.training.step_s / exact.step_s):.0%} for the link"
        if best is exact:
            is_short = exact.step_s < _SHORT * self.training.step_s
            return [f"{'Do not compress' if is_short else 'No faster way fits the limits'}: {why}.", best.lines]
        first = f"{best.name}: {self.speed(best):.3g} times as fast to the same loss as {exact.name}; {why}. To paste:"
        smaller = f"Losses are of models of the sizes above, not scaled to {self.training.parameters:.3g} parameters."
        return [first, best.lines, smaller]

    def apply(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, way: str | None = None
    ) -> tuple[nn.Module, Any]:
        """Makes the model and the optimizer train in a way of this plan, on all ranks of the default group. Collective.

        Once, after 200 steps or four outer ones, rank 0 logs a step's seconds beside the plan's, and how long ops waited and
        coded; as a warning where a step is 20 % off. A step has one backward pass.

        Args:
            model: The planned one.
            optimizer: Of its parameters; None for torch.optim.AdamW of its defaults. With FSDP2 it goes on with the shards.
            way: A name of the table; None for the best that needs no stages. Rank 0's holds for all ranks.

        Returns:
            The model to call and the optimizer to step.

        Raises:
            ValueError: The model or the world is not the planned one, or the way wants a model in stages.
        """
        try:
            mine, why = self._named(way).name, ""
        except ValueError as error:
            mine, why = "", str(error)
        everyones = all_gather_json([mine, why])  # ranks have measured other seconds
        if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(everyones) if text]:
            raise ValueError(failed[0])
        return apply.apply(self.training, self.link, self._named(everyones[0][0]), model, optimizer)

    def _named(self, name: str | None) -> Way:
        if name is None:
            fitting = [way for way in self.ways if self.fits(way) and way.method in apply.METHODS]
            if not fitting:
                raise ValueError("plan: apply: expected a way of DDP, FSDP2 or DiLoCo that fits, got none")
            return self.best if self.best in fitting else max(fitting, key=self.speed)
        found = [way for way in self.ways if way.name == name]
        if not found:
            raise ValueError(f"plan: way: expected one of {', '.join(way.name for way in self.ways)}, got {name!r}")
        return found[0]


def plan(
    model: nn.Module | Training,
    batch: Any = None,
    *,
    link: Link,
    loss: Loss | None = None,
    max_loss: float = 1.01,
    memory: float | None = None,
    total_tokens: float | None = None,
    fine_tuning: bool = False,
) -> Plan:
    """Compares the ways to train a model over a link, from a step measured here without communication.

    Args:
        model: A module, or what is known of a training.
        batch: One rank's, for a module: a tuple of arguments, a dict of them, or the one argument.
        link: The sites and the links between them.
        loss: Makes a scalar of module and batch; None where the module returns one.
        max_loss: The largest factor on the loss of exact training, 1 or more.
        memory: Bytes of a rank; None for this machine's, shared by the ranks of a site.
        total_tokens: Of the whole training; None for 20 a parameter (Chinchilla).
        fine_tuning: Whether the model is trained already, and its samples come back.

    Raises:
        ValueError: An argument is out of its range, or the module returns no scalar or gradients that are not finite.
    """
    training = model if isinstance(model, Training) else measure(model, batch, loss=loss)
    if memory is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / link.ranks_per_site
    total = 20.0 * training.parameters if total_tokens is None else total_tokens
    if max_loss < 1 or not 0 < total < math.inf or memory <= 0:
        got = f"{max_loss:g}, {total:g} and {memory:g}"
        raise ValueError(f"plan: expected max_loss of 1 or more, and tokens and memory above 0, got {got}")
    ways = [way for way in all_ways(training, link) if fine_tuning or not way.fine_tuning]
    return Plan(training, link, ways, max_loss, memory, total)
