"""Bytes that a stage keeps for its boundaries: tensors that it holds in addition to its decoder's own, and that autograd does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import model
import torch
from torch import Tensor, nn

import torch_lowcomm as lc

WIDTH, RANK, STAGES = 64, 8, 3
CONTEXTS = (32, 128, 512, 2048)
VOCABULARIES = (64, 1024, 16384, 65536)


def decoder(context: int, vocabulary: int) -> nn.Module:
    """A constrained byte GPT of a block a stage, of another context and vocabulary than the example's."""
    torch.manual_seed(0)
    gpt = model.GPT(model.Config(width=WIDTH, layers=STAGES, heads=2, context=context))
    gpt.embed = nn.Embedding(vocabulary, WIDTH)
    gpt.head = nn.Linear(WIDTH, vocabulary, bias=False)
    return lc.subspace.constrain(gpt, RANK, sigma=0.1)


def tensors(root: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors that an object holds: in its attributes, and in those of the objects, lists and mappings there."""
    seen = set() if seen is None else seen
    if id(root) in seen or isinstance(root, type | str | bytes | int | float | torch.dtype | torch.device):
        return
    seen.add(id(root))
    if isinstance(root, Tensor):
        yield root
        return
    if isinstance(root, dict):
        parts: Any = root.values()
    elif isinstance(root, list | tuple | set):
        parts = root
    else:
        parts = (
            vars(root).values()
            if isinstance(root, nn.Module) or (not callable(root) and hasattr(root, "__dict__"))
            else ()
        )
    for part in parts:
        yield from tensors(part, seen)


def size(found: list[Tensor], without: list[Tensor]) -> int:
    """Bytes of tensors' memory, each once, less what other tensors have."""
    known = {t.untyped_storage().data_ptr() for t in without}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(bytes_ for place, bytes_ in sizes.items() if place not in known)


def held(index: int, context: int, vocabulary: int, *, turning: bool = False, boundary: Any = None) -> tuple[int, int]:
    """Of a stage after a micro-batch of a whole context.

    Args:
        index: The stage.
        context: Tokens.
        vocabulary: Of the decoder.
        turning: Whether the subspace is to turn (`lc.subspace.Grassmann`).
        boundary: As `lc.subspace.cut`.

    Returns:
        Bytes that the stage holds beyond its decoder's parameters, their gradients and the decoder's own buffers; and those,
        without the basis, that autograd keeps for the sides of its boundaries while the micro-batch is under way.
    """
    whole = decoder(context, vocabulary)
    stage = lc.subspace.cut(whole, index, STAGES, boundary=boundary)
    if turning:
        lc.subspace.Grassmann([stage], lc.SubspaceAdamW(stage))
    ids = torch.arange(context).unsqueeze(0) % vocabulary
    saved: list[Tensor] = []
    keeping = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    for side in (stage.encode, stage.decode):
        if side is not None:
            side.register_forward_pre_hook(lambda *_: keeping.__enter__())
            side.register_forward_hook(lambda *_: keeping.__exit__())
    x = ids if stage.is_first else torch.randn(1, context, stage.rank, requires_grad=True)
    y = stage(x, ids)
    y.backward(torch.randn_like(y))
    assert saved, "autograd keeps the basis"
    basis = list(tensors(stage.subspace_basis))
    own = [*stage.parameters(), *(p.grad for p in stage.parameters() if p.grad is not None)]
    own += [t for name, t in whole.named_buffers() if "subspace" not in name]
    return size(list(tensors(stage)), own), size(saved, basis)


def expected(index: int, *, turning: bool) -> int:
    """The basis in float64 and float32, and on the last stage of those that turn a sum of WIDTH · WIDTH float32 numbers."""
    return 12 * RANK * WIDTH + (4 * WIDTH * WIDTH if turning and index == STAGES - 1 else 0)


def measure(*, quick: bool) -> list[dict[str, Any]]:
    """A row a stage, with and without turning: the least and the most bytes over contexts and vocabularies."""
    some = slice(0, 2) if quick else slice(None)
    rows = []
    for turning, index in itertools.product((False, True), range(STAGES)):
        found = [
            held(index, context, vocabulary, turning=turning)
            for context, vocabulary in itertools.product(CONTEXTS[some], VOCABULARIES[some])
        ]
        stage_bytes, saved_bytes = zip(*found, strict=True)
        rows.append(
            {
                "stage": index,
                "turning": turning,
                "sizes": len(found),
                "least_bytes": min(stage_bytes),
                "most_bytes": max(stage_bytes),
                "expected_bytes": expected(index, turning=turning),
                "autograd_bytes": max(saved_bytes),
            }
        )
    return rows
