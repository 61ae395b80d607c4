"""A stage of a decoder as a module: token ids or coefficients in, coefficients or logits out; and its state dicts."""

import logging
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torch_lowcomm.subspace.anchor import Anchor, Embedding
from torch_lowcomm.subspace.boundary import Boundary
from torch_lowcomm.subspace.families import run_blocks
from torch_lowcomm.subspace.parts import Parts, part_at
from torch_lowcomm.subspace.weights import wide

logger = logging.getLogger(__name__)


class StageModule(nn.Module):
    """Some consecutive blocks of a decoder, with what stands before and behind them; `cut` makes it.

    Its parts have the names that they have in the decoder, so that its state dict is a part of the decoder's. It takes the state
    dict of a whole decoder, too, and picks its own.

    Attributes:
        exact: Whether all stages together compute what the decoder does.
        rank: Coefficients a token.
        coefficients: What a coefficient travels as.
        encode: The side of the boundary behind the stage; None on the last one.
        decode: The side of the boundary before it; None on the first one.
    """

    message_context_names = ("ids", "basis", "boundary")
    message_finite = True
    encode: nn.Module | None
    decode: nn.Module | None

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        *,
        index: int,
        count: int,
        blocks: range,
        boundary: Boundary,
        coefficients: str,
    ) -> None:
        """Takes a stage's parts of a decoder; `cut` calls this. The parts are the decoder's own, not copies."""
        super().__init__()
        self.subspace_parts = parts
        self.index, self.count, self.block_numbers = index, count, blocks
        self.exact = boundary.exact and coefficients == "fp32"
        self.coefficients = coefficients
        self.message_codec = None if coefficients in ("fp32", "bf16") else coefficients
        embedding = model.get_submodule(parts.embedding)
        self.vocabulary, self.width = embedding.weight.shape
        if hasattr(model, "config"):
            self.config = model.config
        self._told = count == 1  # of autocast, where there is a boundary
        self._take(model, embedding)
        self.rank = boundary.rank or self.subspace_basis.rank
        self._boundary = zlib.crc32(f"{boundary!r}, coefficients={coefficients}".encode())
        self.register_load_state_dict_pre_hook(pick)
        for side, there in (("encode", not self.is_last), ("decode", not self.is_first)):
            made = boundary.side(self, encodes=side == "encode") if there else None
            object.__setattr__(self, side, made)  # it has no parameters, and is no part of the stage

    @property
    def is_first(self) -> bool:
        """Whether token ids come in."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether logits come out."""
        return self.index == self.count - 1

    @property
    def name(self) -> str:
        """The stage in an error."""
        return f"stage {self.index} of {self.count}"

    def _take(self, model: nn.Module, embedding: nn.Module) -> None:
        """Places the stage's parts under their names."""
        parts = self.subspace_parts
        if self.is_first:
            place(self, parts.embedding, embedding)
            if parts.positions is not None:
                place(self, parts.positions, part_at(model, parts.positions))
        if parts.rotary is not None:
            place(self, parts.rotary, model.get_submodule(parts.rotary))
        mine = {str(number): block for number, block in parts.blocks_of(model) if number in self.block_numbers}
        place(self, parts.blocks, nn.ModuleDict(mine))
        if self.is_last:
            place(self, parts.norm, model.get_submodule(parts.norm))
            place(self, parts.head, model.get_submodule(parts.head))
        if isinstance(embedding, Embedding):
            fixed, table = embedding.anchor, parts.table(model)
            self.subspace_basis = embedding.subspace_basis
            self.subspace_anchor = fixed if table is None else with_positions(fixed, table)

    def forward(
        self,
        x: torch.Tensor,
        ids: torch.Tensor | None = None,
        *,
        start: int = 0,
        cache: Any = None,
        only_last: bool = False,
    ) -> torch.Tensor:
        """Runs the stage on a micro-batch, or on its next positions; mistakes are ValueErrors that name the stage.

        Args:
            x: Token ids, an integer tensor [batch, time], on the first stage; on others the coefficients [batch, time, rank]
                that the stage before has returned.
            ids: The same tokens, on every stage but the first, which needs x alone: a keyword of `schedule.step`.
            start: How many positions come before x's first.
            cache: The blocks' keys and values of those, by `families.new_cache`.
            only_last: Whether logits are those of the last position alone, [batch, 1, vocabulary].

        Returns:
            Coefficients; logits [batch, time, vocabulary] on the last stage.
        """
        ids = self._expected_ids(x, ids)
        parts = self.subspace_parts
        if self.is_first:
            y = self.get_submodule(parts.embedding)(ids)
            table = parts.table(self)
            if table is not None:
                end = start + ids.shape[1]
                if end > len(table):
                    raise ValueError(f"{self.name}: ids: expected at most {len(table)} places, the table's, got {end}")
                y = y + table[start:end]
        else:
            y = self.decode(wide(x), ids, start).to(self._dtype())
        if self.exact and not self._told and torch.is_autocast_enabled(y.device.type):
            self._told = True
            logger.warning("%s: not exact: autocast rounds what blocks add to the residual stream", self.name)
        y = run_blocks(parts, self, y, start=start, cache=cache)
        if self.is_last:
            y = y[:, -1:] if only_last else y
            return self.get_submodule(parts.head)(self.get_submodule(parts.norm)(y))
        coefficients = self.encode(y, ids, start)
        return coefficients.bfloat16() if self.coefficients == "bf16" else coefficients

    def message_context(
        self, x: torch.Tensor | None = None, *, ids: torch.Tensor | None = None, **_: Any
    ) -> dict[str, int]:
        """The numbers that stages compare in each micro-batch: checksums of its tokens, the basis and the boundary."""
        tokens = ids if x is None else x  # the first stage computes on x
        basis, anchor = self._modules.get("subspace_basis"), self._modules.get("subspace_anchor")
        return {
            "ids": 0 if tokens is None else zlib.crc32(tokens.to("cpu", torch.int64).contiguous().numpy().tobytes()),
            "basis": 0 if basis is None else basis.checksum,
            "boundary": self._boundary if anchor is None else zlib.crc32(b"anchor", self._boundary ^ anchor.checksum),
        }

    @property
    def message_options(self) -> dict[str, str]:
        """The texts that stages compare before the first step: the coefficients of a token, and checksums as above."""
        context = self.message_context()
        return {
            "coefficients": f"{self.rank} of {self.width} as {self.coefficients}",
            "free_blocks": str(getattr(self._modules.get("subspace_basis"), "free_blocks", 0)),
            "basis": f"{context['basis']:#x}",
            "boundary": f"{context['boundary']:#x}",
        }

    @property
    def places(self) -> int | None:
        """Rows of the table of positions, where there is one and the stage knows of it."""
        table = self.subspace_parts.table(self) if self.is_first else None
        if table is None and "subspace_anchor" in self._modules:
            table = self.subspace_anchor.positions
        return None if table is None else len(table)

    @property
    def coefficient_dtype(self) -> torch.dtype:
        """The type of the coefficients that come in and go out."""
        if self.coefficients == "bf16":
            return torch.bfloat16
        return torch.promote_types(self._dtype(), torch.float32)

    def expect_ids(self, ids: torch.Tensor) -> None:
        """Refuses what is no integers [batch, time] of the vocabulary."""
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"{self.name}: ids: expected integers [batch, time], got {ids.dtype} {list(ids.shape)}")
        if ids.numel() and not ids.is_meta:
            low, high = torch.stack(torch.aminmax(ids)).tolist()
            if low < 0 or high >= self.vocabulary:
                raise ValueError(f"{self.name}: ids: expected 0...{self.vocabulary - 1}, got {low} to {high}")

    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.float32)

    def _expected_ids(self, x: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        if self.is_first:
            if ids is not None and ids.shape != x.shape:
                raise ValueError(f"{self.name}: ids: expected the shape of x, {list(x.shape)}, got {list(ids.shape)}")
            ids = x
        elif ids is None:
            raise ValueError(f"{self.name}: expected ids=, the tokens of the micro-batch, on every stage, got none")
        self.expect_ids(ids)
        ids = ids.long()
        if not self.is_first and (x.dim() != 3 or x.shape[:2] != ids.shape):
            raise ValueError(
                f"{self.name}: expected coefficients [{ids.shape[0]}, {ids.shape[1]}, rank] for the ids, got {list(x.shape)}"
            )
        if not self.is_first and x.shape[2] != self.rank:
            raise ValueError(
                f"{self.name}: expected {self.rank} coefficients a token, this stage's rank, got {x.shape[2]}"
            )
        return ids

    def extra_repr(self) -> str:
        """The stage's place and its blocks."""
        return f"{self.name}, blocks {blocks_text(self.block_numbers)}, coefficients={self.coefficients}"


def place(root: nn.Module, path: str, part: nn.Module | torch.Tensor) -> None:
    """Makes a part the one at a path of a module, with plain modules on the way."""
    *way, name = path.split(".")
    for step in way:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    if isinstance(part, nn.Parameter):
        root.register_parameter(name, part)
    elif isinstance(part, torch.Tensor):
        root.register_buffer(name, part)
    else:
        root.add_module(name, part)


def with_positions(anchor: Anchor, table: torch.Tensor) -> Anchor:
    """An anchor that adds positions, which the embedding's does not: the decoder adds them itself, from the same memory."""
    options: dict[str, Any] = {"seed": anchor.seed, "sigma": anchor.sigma, "fixed": anchor.fixed}
    return Anchor(anchor.vocabulary, anchor.width, positions=table, **options)


def merge_states(states: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Puts the state dicts of all stages of a cut together to that of the decoder, for stages of another cut to load.

    A stage's `load_state_dict` picks its own part of it. Two stages with other values under one name are a ValueError.
    """
    merged: dict[str, torch.Tensor] = {}
    for number, state in enumerate(states):
        for name, value in state.items():
            if name in merged and not torch.equal(merged[name], value):
                raise ValueError(
                    f"{name}: expected the same on all stages that have it, got another value in state {number}"
                )
            merged[name] = value
    return merged


def expect_free_blocks(module: Any, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuses a state dict of a decoder that has another number of free blocks; a hook of constrained decoders."""
    basis, saved = getattr(module, "subspace_basis", None), state.get(f"{prefix}subspace_basis._extra_state")
    if basis is None or saved is None:
        return
    free = int(saved)
    if free != basis.free_blocks:
        raise ValueError(
            f"free_blocks: expected the state of a decoder with free_blocks={basis.free_blocks}, as this one was constrained, "
            f"got one with free_blocks={free}: load it into lc.subspace.constrain(..., free_blocks={free})"
        )


def pick(stage: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Removes from a state dict that is being loaded what other stages have; a hook of `StageModule`. Refuses one without the
    stage's blocks, of a decoder that was cut elsewhere.
    """
    expect_free_blocks(stage, state, prefix)
    parts, mine = stage.subspace_parts, stage.block_numbers
    block = re.compile(re.escape(f"{prefix}{parts.blocks}.") + r"(\d+)\.")
    there = {int(match[1]) for name in state if (match := block.match(name))}
    if not set(mine) <= there:
        raise ValueError(
            f"{stage.name} has blocks {blocks_text(mine)}, the state dict has {blocks_text(there)}: the decoder was cut "
            f"elsewhere; give it the states of all stages, put together by lc.subspace.merge_states"
        )
    own = {f"{prefix}{name}" for name in stage.state_dict()}
    paths = (parts.embedding, parts.positions, parts.norm, parts.head)
    others = tuple(f"{prefix}{path}." for path in paths if path is not None)
    for name in list(state):
        match = block.match(name)
        other = int(match[1]) not in mine if match else f"{name}.".startswith(others)
        if other and name not in own:
            del state[name]


def blocks_text(blocks: Iterable[int]) -> str:
    """Numbers of blocks in a sentence: 2...5."""
    numbers = sorted(blocks)
    if not numbers:
        return "none"
    whole = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    return f"{numbers[0]}...{numbers[-1]}" if whole else ", ".join(map(str, numbers))
