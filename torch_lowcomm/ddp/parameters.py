"""A state's options, how each parameter is sent, and the state of its compression, keyed by parameter and not by bucket."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_lowcomm import _C
from torch_lowcomm._host_levels import HostLevels
from torch_lowcomm.codec import CODED
from torch_lowcomm.codec import codec as checked_codec

_RESIDUALS = ("float32", "int8")


@dataclass(frozen=True)
class StateOptions:
    """What `State` was given, under its names; ranks compare what is checked."""

    codec: str
    projection_codec: str | None
    rank: int | None
    error_feedback: bool
    residual_dtype: str
    warm_up_steps: int

    def checked(self) -> StateOptions:
        """Returns the options with canonical codecs, `projection_codec` always one, and the rank 0 for no factors."""
        coded, rank = _poisoning("codec", self.codec), self.rank
        given = self.projection_codec
        projection = coded if given is None else _poisoning("projection_codec", given)
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise ValueError(f"ddp.State: rank: expected 1 or more, or None for no factors, got {rank!r}")
        if given is not None and rank is None:
            raise ValueError("ddp.State: projection_codec: expected rank= too, got none")
        if not isinstance(self.warm_up_steps, int) or self.warm_up_steps < 0:
            raise ValueError(f"ddp.State: warm_up_steps: expected 0 or more, got {self.warm_up_steps!r}")
        if self.residual_dtype not in _RESIDUALS:
            raise ValueError(f"ddp.State: residual_dtype: expected one of {_RESIDUALS}, got {self.residual_dtype!r}")
        feedback = bool(self.error_feedback)
        return replace(self, codec=coded, projection_codec=projection, rank=rank or 0, error_feedback=feedback)

    def of_state(self) -> dict[str, object]:
        """Those that a saved state depends on."""
        return {name: getattr(self, name) for name in ("rank", "error_feedback", "residual_dtype")}


def _poisoning(name: str, text: str) -> str:
    """Returns the codec with nonfinite=poison: a NaN of one rank must reach every rank's gradients and raise no error."""
    spec = checked_codec(text).spec
    if spec == "none":
        raise ValueError(
            f"ddp.State: {name}: expected a lossy codec (for exact gradients register no hook), got {spec!r}"
        )
    if spec.startswith(("levels", "log")) or "axis=channel" in spec:
        raise ValueError(f"ddp.State: {name}: expected one of flat tensors, not levels, logbyte or log9, got {spec!r}")
    if "nonfinite=" in spec:
        return spec
    return checked_codec(f"{spec}{',' if ':' in spec else ':'}nonfinite=poison").spec


MIN_ELEMENTS = 1024


Named = tuple[str, torch.Tensor, bool]


@dataclass(frozen=True)
class Entry:
    """A parameter with its key and how it is sent."""

    key: str
    parameter: torch.Tensor
    exact: bool  # by request
    rank: int | None  # of its factors; 0: it is coded without; None: it is sent exactly
    parts: list[tuple[int, int]]  # by place of a host: the elements [begin, end) that its rank sends; one a flat group
    compression: _C.Compression | None  # of this rank's part; None: it sends nothing, or exactly
    slot: int  # first slot of the group's random draws
    number: int  # the parameter's place in the model; decides which ranks sum its slices

    def tensors(self, group_rank: int) -> dict[str, torch.Tensor]:
        """Returns the tensors for a checkpoint: the residual of this rank, and the factor, which is equal on all ranks."""
        if self.compression is None:
            return {}
        kept = {
            f"rank{group_rank}.{self.key}.residual": self.compression.residual,
            f"{self.key}.factor": self.compression.factor,
        }
        return {name: tensor for name, tensor in kept.items() if tensor is not None}


class Parameters:
    """The entries of one model. `fixed`: the named ones are all; if not, others are keyed by the order in which they are first
    seen. The backend gives the slots for random draws; with `levels` it is that between hosts. `rank` is this
    rank in the model's group.
    """

    def __init__(
        self,
        backend: _C.LowcommBackend,
        options: StateOptions,
        named: Sequence[Named],
        *,
        fixed: bool,
        rank: int,
        levels: HostLevels | None,
    ) -> None:
        self._backend, self._options, self._levels = backend, options, levels
        self._rank = rank  # in the model's group, for names of checkpoints
        self._entries: dict[int, Entry] = {}  # by id: an entry keeps its parameter alive
        self._loaded: dict[str, torch.Tensor] | None = None  # from a checkpoint, for parameters that are not known yet
        self._fixed = fixed
        for key, parameter, exact in named:
            self._add(key, parameter, exact)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def named(self) -> list[Named]:
        """What makes the same entries again."""
        return [(entry.key, entry.parameter, entry.exact) for entry in self]

    def coded(self) -> str:
        """Returns the text that ranks compare: the number of coded parameters, and a hash of their keys and shapes."""
        coded = [e for e in self if e.rank is not None]
        text = ";".join(f"{e.key} {list(e.parameter.shape)} {e.rank}" for e in coded)
        return f"{len(coded)}, hash {zlib.crc32(text.encode()):08x}"

    def of(self, parameter: torch.Tensor) -> Entry:
        """Returns the entry of a parameter, and makes it if the parameter is new and the state has no model."""
        found = self._entries.get(id(parameter))
        if found is not None:
            return found
        if self._fixed:
            raise ValueError(
                f"ddp: expected a parameter of the state's model, got another one, of shape {tuple(parameter.shape)}: "
                "give each model a separate State"
            )
        return self._add(str(len(self._entries)), parameter, False)

    def _add(self, key: str, parameter: torch.Tensor, exact: bool) -> Entry:
        small = parameter.ndim < 2 or parameter.numel() < MIN_ELEMENTS
        compression, slot, rank, number = None, 0, None, len(self._entries)
        parts = [(0, parameter.numel())]
        if not (exact or small or parameter.dtype not in CODED):
            shape = list(parameter.shape)
            rank = self._options.rank or 0
            rank = rank if rank and _C.is_low_rank(shape[0], parameter.numel() // shape[0], rank) else 0
            if self._levels is not None:  # factors are of whole matrices
                parts = self._levels.cut(parameter.numel(), number, whole=rank > 0)
                begin, end = parts[self._levels.place]
                shape = shape if end - begin == parameter.numel() else [end - begin]
            if math.prod(shape):
                compression = _C.Compression(
                    shape,
                    rank=rank,
                    feedback=self._options.error_feedback,
                    eight_bits=self._options.residual_dtype == "int8",
                    seed=zlib.crc32(key.encode()),
                )
            slot = self._backend.reserve_slots(2 * self._backend.size())
        entry = Entry(key, parameter, exact, rank, parts, compression, slot, number)
        self._entries[id(parameter)] = entry
        if self._loaded is not None:
            self._check(entry, self._loaded)
            self._fill(entry, self._loaded)
            self._loaded = self._untaken(self._loaded)
        return entry

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of every entry, and those of a loaded state that no parameter has taken yet."""
        state = dict(self._loaded or {})
        for entry in self:
            state |= entry.tensors(self._rank)
        return state

    def load(self, tensors: dict[str, Any]) -> None:
        """Loads the entries' tensors, after `check`, and keeps the other tensors for parameters that are not known yet."""
        self.check(tensors)
        for entry in self:
            self._fill(entry, tensors)
        self._loaded = self._untaken(tensors)

    def check(self, tensors: dict[str, Any]) -> None:
        """Refuses tensors for `load` of which one is missing, or has another shape or dtype."""
        for entry in self:
            self._check(entry, tensors)

    def load_own(self, tensors: dict[str, Any]) -> None:
        """Loads a copy's tensors, of whatever rank: factors, which are equal on all ranks, and residuals of this rank."""
        rank = self._rank
        self.load({name: tensors.get(name, new) for entry in self for name, new in entry.tensors(rank).items()})

    def _untaken(self, tensors: dict[str, Any]) -> dict[str, Any]:
        taken = {name for entry in self for name in entry.tensors(self._rank)}
        return {name: tensor for name, tensor in tensors.items() if name not in taken}

    def _check(self, entry: Entry, tensors: dict[str, Any]) -> None:
        for name, kept in entry.tensors(self._rank).items():
            if name not in tensors:
                raise ValueError(
                    f"ddp: expected {name!r} in the loaded state, got none: each rank loads its own, and "
                    "torch.distributed.checkpoint needs a State with model="
                )
            given = tensors[name]
            if not isinstance(given, torch.Tensor):
                raise ValueError(f"ddp: {name}: expected a tensor, got {given!r}")
            if given.shape != kept.shape or given.dtype != kept.dtype:
                raise ValueError(
                    f"ddp: {name}: expected {kept.dtype} of shape {tuple(kept.shape)}, got {given.dtype} of shape "
                    f"{tuple(given.shape)}"
                )

    def _fill(self, entry: Entry, tensors: dict[str, Any]) -> None:
        if entry.compression is not None:
            rank = self._rank
            entry.compression.set(tensors.get(f"rank{rank}.{entry.key}.residual"), tensors.get(f"{entry.key}.factor"))
