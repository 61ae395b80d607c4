"""Cuts a decoder into stages for torch's pipelining."""

import logging
from collections.abc import Sequence

from torch import nn

from torch_lowcomm import _C
from torch_lowcomm._option_table import expect_integer
from torch_lowcomm.subspace.boundary import Boundary, Exact
from torch_lowcomm.subspace.check import constrained_parts, cut_apart, shared_names
from torch_lowcomm.subspace.compare import compare
from torch_lowcomm.subspace.families import parts_of
from torch_lowcomm.subspace.parts import Parts
from torch_lowcomm.subspace.stage import StageModule

logger = logging.getLogger(__name__)


def cut(
    model: nn.Module,
    index: int,
    count: int,
    *,
    blocks: Sequence[int] | None = None,
    coefficients: str = "fp32",
    boundary: Boundary | None = None,
    parts: Parts | None = None,
) -> StageModule:
    """Makes one stage of a decoder; all ranks cut the same decoder in the same way.

    Args:
        model: What `constrain` returned. With another boundary than the exact one any decoder, whose weights stay free.
        index: The stage's place, 0...count - 1.
        count: Stages in all. 1 is the whole decoder, which the same schedules run without a message.
        blocks: The number of blocks of each stage. None: as equal as they can be, more on the first stages.
        coefficients: What a coefficient travels as, both ways: "fp32" (exact; fp64 in an fp64 decoder), "bf16", or a codec, say
            "minmax8:bucket=128", which the stage has as `message_codec`.
        boundary: One of your own, a `subspace.boundary.Boundary`, in place of the exact one.
        parts: The parts of a decoder that is not constrained, where they are not found.

    Returns:
        A module that shares its parts with the model. It takes token ids, or coefficients and `ids=`; see `StageModule.forward`.

    Raises:
        TypeError: The model is not constrained, and the boundary is the exact one; it is a stage already; or an argument has
            another type.
        ValueError: There is no such stage, `blocks` are not one number above 0 a stage that add up to the model's, a codec is
            unknown, two stages would train one parameter, a boundary would be behind a free block, or a free decoder computes
            something else than its parts do, one after the other.
    """
    if isinstance(model, StageModule):
        raise TypeError(f"cut: expected a whole decoder, got {model.name}")
    if not isinstance(coefficients, str):
        raise TypeError(f"coefficients: expected 'fp32', 'bf16' or a codec, got {coefficients!r}")
    if boundary is not None and not hasattr(boundary, "side"):
        raise TypeError(f"boundary: expected a Boundary or None, got {boundary!r}")
    for name, number in (("index", index), ("count", count), *(("blocks", size) for size in blocks or ())):
        expect_integer(f"subspace: {name}", number)
    if boundary is None:
        parts, _ = constrained_parts(model)
    else:
        parts = parts or getattr(model, "subspace_parts", None) or parts_of(model)
        if found := cut_apart(parts, model) or compare(parts, model, exact=False):
            raise ValueError(f"cut: stages would compute something else than the decoder: {found[0]}")
    total = len(parts.blocks_of(model))
    if not 1 <= count <= total:
        raise ValueError(f"count: expected 1...{total}, the number of blocks, got {count}")
    if not 0 <= index < count:
        raise ValueError(f"index: expected one of 0...{count - 1}, got {index}")
    sizes = [total // count + (stage < total % count) for stage in range(count)] if blocks is None else list(blocks)
    if len(sizes) != count or min(sizes) < 1 or sum(sizes) != total:
        raise ValueError(f"blocks: expected {count} numbers above 0 that add up to {total}, got {sizes}")
    if boundary is None:
        _expect_constrained(parts, sizes)
    _expect_own_parameters(model, parts, sizes)
    if coefficients not in ("fp32", "bf16"):
        _C.Codec(coefficients)
    if boundary is not None or coefficients != "fp32":
        logger.info("cut: not exact: %s, coefficients %s", boundary or "the subspace's coefficients", coefficients)
    start = sum(sizes[:index])
    return StageModule(
        model,
        parts,
        index=index,
        count=count,
        blocks=range(start, start + sizes[index]),
        boundary=boundary or Exact(),
        coefficients=coefficients,
    )


def _expect_constrained(parts: Parts, sizes: Sequence[int]) -> None:
    """Refuses an exact boundary behind a free block: what such a block adds to the residual stream is not in the subspace."""
    last = sum(sizes[:-1])  # the block behind the last boundary
    if len(sizes) > 1 and parts.is_free(last - 1):
        free = sum(sizes) - (parts.free_from or 0)
        raise ValueError(
            f"cut: expected the last boundary before block {parts.free_from}, the first of {free} free ones, or further to the "
            f"front, got one before block {last}: give the last stage {free} blocks or more (blocks=), or constrain the "
            f"decoder with free_blocks={sizes[-1]} at most"
        )


def _expect_own_parameters(model: nn.Module, parts: Parts, sizes: Sequence[int]) -> None:
    """Refuses stages that would share a trained parameter, by its names on both."""
    stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    for places in shared_names(parts, model):
        by_stage: dict[int, str] = {}
        for place, name in places.items():
            block = place.removeprefix(f"{parts.blocks}.")
            ends = stages[-1] if place in (parts.norm, parts.head) else 0
            by_stage.setdefault(stages[int(block)] if block != place else ends, name)
        if len(by_stage) > 1:
            (one, name), (other, again), *_ = sorted(by_stage.items())
            raise ValueError(
                f"cut: expected trained parameters that one stage has, got {name} of stage {one}, which is {again} of stage "
                f"{other} too: copy it for one of them, or freeze it"
            )
