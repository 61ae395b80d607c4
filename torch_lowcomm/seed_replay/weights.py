"""The weights that seed replay trains: their core, how they are perturbed, and what a checkpoint has of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from torch_lowcomm import _C
from torch_lowcomm._text_difference import differing_parts
from torch_lowcomm.seed_replay.at_use import AtUse
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks
from torch_lowcomm.seed_replay.options import SeedReplayOptions
from torch_lowcomm.seed_replay.perturbation import InPlace, InShards, Perturbation, copy_all
from torch_lowcomm.seed_replay.shards import Entry, ShardedCore, expect_same_memory, gathered, like, scattered


class TrainedWeights:
    """The weights of one machine that records move: `core` has those on which machines agree. `own` has the trained
    parameters, of a sharded model this rank's shards. With a base they give up their memory, and the list gets what is left of
    them: no reference may keep it.
    """

    perturbation: Perturbation

    def __init__(
        self,
        model: nn.Module,
        own: list[Entry],
        options: SeedReplayOptions,
        machine: int,
        ranks: MachineRanks,
    ) -> None:
        self._parameters = parameters = [p for p in model.parameters() if p.requires_grad]
        self._own, self._ranks, self._has_base = own, ranks, options.base is not None
        tensors, several = [tensor for _, tensor, _, _ in own], ranks.several
        shapes = [list(p.shape) for p in parameters] if several else None
        core = moved = _C.SeedReplay(own, options.for_core(), shapes)
        if options.perturb == "in-place":
            copied = [tensor.clone() for tensor in tensors]
            second = [(name, copy, decays, first) for (name, _, decays, first), copy in zip(own, copied, strict=True)]
            moved = _C.SeedReplay(second, options.for_core(), shapes)
            self.perturbation = InPlace(tensors, core, moved, copied, machine, options.restore_every)
        elif several:
            self.perturbation = InShards(core, tensors, machine)
        else:
            numbers = {id(p): number for number, p in enumerate(parameters)}
            if self._has_base:
                for p in parameters:
                    p.data = torch.empty(0, dtype=p.dtype, device=p.device)
                own[:] = [(name, p.detach(), *rest) for (name, _, *rest), p in zip(own, parameters, strict=True)]
            self.perturbation = AtUse(model, core, numbers, machine, quantized=self._has_base)
        self.core = moved
        if ranks.several:
            self.perturbation.sharded = model
            self.core = cast("_C.SeedReplay", ShardedCore(moved, ranks, own))

    def expect_rates(self, lr: float, weight_decay: float) -> list[Any]:
        """Checks what an iteration begins with, and returns what ranks of a machine have in common then."""
        self.core.check_rates(lr=lr, weight_decay=weight_decay)
        if self._ranks.several:
            expect_same_memory(self._own, self._parameters)
        return [self.core.iteration, lr, weight_decay]

    def state(self) -> dict[str, Any]:
        """Returns iteration, checksum of the weights, the pool's sums, and a description of weights and options."""
        core = self.core
        return {
            "iteration": core.iteration,
            "checksum": core.checksum(),
            "sums": core.sums,
            "description": core.description,
        }

    def expect_same(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where a state is of other weights or options, by its description."""
        if state["description"] != self.core.description:
            mine, saved = differing_parts(self.core.description, state["description"])
            raise ValueError(f"SeedReplay: state: expected one of {mine!r}, got one of {saved!r}")

    def load(self, state: Mapping[str, Any], load_others: Callable[[], None]) -> None:
        """Goes on from a state, whose weights the model has. `load_others` loads what else belongs to it, once these have been
        compared. Where it raises the core is as it was.
        """
        self.perturbation.take()
        sums = self.core.sums
        self.core.sums = state["sums"]
        try:
            found = self.core.checksum()
            if found != state["checksum"]:
                raise ValueError(
                    f"SeedReplay: state: expected weights with CRC-32C {state['checksum']:08x}, which it was saved with, got "
                    f"{found:08x}: load the model's state first"
                )
            load_others()
        except BaseException:
            self.core.sums = sums
            raise
        self.core.iteration = state["iteration"]
        self.perturbation.restore()

    def values(self) -> dict[str, torch.Tensor]:
        """Returns copies by name; of a quantized base what its codes mean, of a sharded model DTensors like its parameters."""
        copies = [self.core.perturbed(number, 0, 0, 0.0) for number in range(len(self._own))]
        return {name: like(w, p) for (name, _, _, _), w, p in zip(self._own, copies, self._parameters, strict=True)}

    def whole(self) -> dict[str, torch.Tensor] | None:
        """Returns the weights as `SeedReplay.snapshot` has them."""
        if self._has_base:
            return None
        values = self.values()
        return gathered(values, self._ranks) if self._ranks.several else values

    def part_of(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a snapshot that the machine's first rank has. Collective of the machine."""
        if not self._ranks.several:
            return snapshot
        return scattered(snapshot, self._own, self._parameters, self._ranks)

    @contextmanager
    def replaced(self, values: Mapping[str, torch.Tensor] | None) -> Iterator[None]:
        """Sets the model's weights to values, or with None leaves them; the block may refuse them by raising."""
        if values is None:
            yield
            return
        weights = [weight for _, weight, _, _ in self._own]
        before = [weight.clone() for weight in weights]
        try:
            copy_all([values[name] for name, _, _, _ in self._own], to=weights)
            yield
        except BaseException:
            copy_all(before, to=weights)
            self.perturbation.take()
            raise
