"""Compares a decoder that runs whole with the same decoder cut behind each of its blocks."""

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_lowcomm._modes import evaluating
from torch_lowcomm.subspace.basis import Basis, without_autocast
from torch_lowcomm.subspace.boundary import Decode, Encode
from torch_lowcomm.subspace.families import is_transformers, run_blocks
from torch_lowcomm.subspace.parts import Parts
from torch_lowcomm.subspace.stage import with_positions
from torch_lowcomm.subspace.weights import ConstrainedWeight, constrained_weights, wide

logger = logging.getLogger(__name__)

_TIME = 4  # positions of the made-up tokens
_Calls = dict[str, list[tuple[Tensor, Tensor]]]  # of each part, by its path: what it was given and what it returned


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that keeps a boundary from being exact.

    Attributes:
        module: The name of the module or parameter.
        reason: Why, and by how much where that is a number.
        half: Whether it is only that the residual stream is rounded to half precision.
    """

    module: str
    reason: str
    half: bool = False

    def __str__(self) -> str:
        return f"{self.module}: {self.reason}"


def distance(basis: Basis, x: Tensor, *, weight: bool = False) -> float:
    """‖x − x·U·Uᵀ‖ / ‖x‖ over the last dimension, or over the first of a linear map's weight; 0 for zeros."""
    x = wide(x.detach())
    return _share(basis.project_weight(x) if weight else basis.project(x), x)


def _share(x: Tensor, y: Tensor) -> float:
    """‖x − y‖ / ‖y‖; infinity for other shapes."""
    return float((x - y).norm()) / max(float(y.norm()), 1e-30) if x.shape == y.shape else float("inf")


def tolerance(dtype: torch.dtype) -> float:
    """The share of a norm that rounding in a type explains."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)


def is_here(parameter: Tensor) -> bool:
    """Whether a parameter has all its values: it is neither on the meta device nor a shard."""
    return not parameter.is_meta and type(parameter.data) is Tensor


@without_autocast
@torch.no_grad()
def compare(parts: Parts, root: nn.Module, *, exact: bool) -> list[Finding]:
    """Runs a decoder whole and as stages run it, and names the first place where the two differ.

    Both runs have the same tokens, are in training mode, and seed each block alike. In the second one blocks are called one by
    one, and what a constrained one returns is encoded to coefficients and decoded, which has to change nothing. An optimizer will
    change a gain that is 1 and a bias that is 0, so these and constrained weights are drawn, the last in the subspace.

    Of a stage only the boundaries are compared. So are those of a decoder that cannot be called with tokens alone, or has
    parameters that are not here, which is logged. With `exact` false a decoder is free, and is cut without boundaries.
    """
    absent = [name for name, p in root.named_parameters() if not is_here(p)]
    if absent:
        message = "check: %s is sharded or on the meta device: neither its block nor the whole decoder is run"
        logger.warning(message, absent[0])
    if absent and (not exact or not any(map(is_here, root.parameters()))):
        return []
    with _drawn(root):
        whole = _run_whole(parts, root) if parts.is_whole(root) and not absent else None
        return _first_difference(parts, root, whole, exact=exact)


@contextlib.contextmanager
def _drawn(root: nn.Module) -> Iterator[None]:
    """Sets training mode, draws gains, biases and constrained weights, and puts everything back."""
    constrained = {weight.parameter: weight for weight in constrained_weights(root) if not weight.is_coordinates}
    kept: dict[nn.Parameter, Tensor] = {}
    made: dict[Any, Tensor] = {}  # one matrix for all weights of a shape: one for each would take much memory
    with torch.random.fork_rng({p.device for p in root.parameters() if p.is_cuda}), evaluating(root, train=True):
        _seed(0, next(filter(is_here, root.parameters())))
        try:
            for p in filter(is_here, root.parameters()):
                if p in constrained and p.dim() > 1:
                    kept[p], key = p.data, (constrained[p].axis, p.shape, p.dtype, p.device)
                    p.data = made[key] = made[key] if key in made else _in_subspace(constrained[p], _size(root))
                elif p.requires_grad and p.numel() and (p.dim() <= 1 or bool((p == p.flatten()[0]).all())):
                    kept[p] = p.data
                    p.data = torch.rand_like(p) + 0.5
            yield
        finally:
            for p, data in kept.items():
                p.data = data


def _seed(seed: int, x: Tensor) -> None:
    """Seeds the generators of the host and of a tensor's device; torch.manual_seed would seed devices that come up later, too."""
    torch.default_generator.manual_seed(seed)
    if x.is_cuda:
        torch.cuda.default_generators[x.get_device()].manual_seed(seed)


def _size(root: nn.Module) -> float:
    """The size of the elements of the embedding's fixed part, which made-up numbers have too: neither then hides the other."""
    return root.subspace_anchor.sigma or 1.0


def _in_subspace(weight: ConstrainedWeight, size: float) -> Tensor:
    """A drawn weight; an embedding's has one row for all tokens, and takes the memory of one."""
    p, basis, one = weight.parameter, weight.basis, weight.axis == 1
    rows = basis.rows(p.dtype)
    drawn = torch.randn(basis.rank, 1 if one else p.shape[1], dtype=rows.dtype, device=p.device)
    columns = (rows.T @ drawn * size * (basis.width / basis.rank / drawn.shape[1]) ** 0.5).to(p.dtype)
    return columns.T.expand_as(p) if one else columns


def _tokens(parts: Parts, root: nn.Module) -> Tensor:
    """Two rows of made-up tokens, [2, time]."""
    embedding = parts.embedding_of(root)
    vocabulary = root.subspace_anchor.vocabulary if embedding is None else len(embedding.weight)
    device = next(p.device for p in root.parameters() if is_here(p))
    return torch.arange(2 * _TIME, device=device).view(2, _TIME) % vocabulary


def _run_whole(parts: Parts, root: nn.Module) -> tuple[_Calls, Any] | None:
    """The calls of blocks, norm and head, and what the decoder returns; None where it cannot be called with tokens alone."""
    calls: _Calls = defaultdict(list)
    inputs: dict[str, Tensor] = {}

    def before(path: str, seed: int, _module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[path] = (args[0] if args else kwargs["hidden_states"]).clone()  # which a module may write to
        _seed(seed, inputs[path])

    def after(path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        calls[path].append((inputs[path], (output[0] if isinstance(output, tuple) else output).clone()))

    ids, needed = _tokens(parts, root), 1
    if not is_transformers(root):  # tokens for every argument that has no default
        takes = inspect.signature(root.forward).parameters.values()
        needed = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in takes)
    with contextlib.ExitStack() as hooks:
        for seed, (path, module, _) in enumerate(_in_order(parts, root)):
            hook = functools.partial(before, path, seed)
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(functools.partial(after, path)).remove)
        try:
            return calls, root(*[ids] * max(needed, 1))
        except Exception as error:
            logger.warning(
                "check: %s could not be called with tokens alone, [2, %d]: what it computes besides its parts is not known "
                "(%s: %s)",
                *(type(root).__name__, _TIME, type(error).__name__, error),
            )
            return None


def _in_order(parts: Parts, root: nn.Module) -> list[tuple[str, nn.Module, int | None]]:
    """(path, module, number) of the blocks, and of a decoder's norm and head, which have no number."""
    behind = (parts.norm, parts.head) if parts.is_whole(root) else ()
    blocks = [(f"{parts.blocks}.{number}", block, number) for number, block in parts.blocks_of(root)]
    return [*blocks, *((path, root.get_submodule(path), None) for path in behind)]


def _first_difference(parts: Parts, root: nn.Module, whole: tuple[_Calls, Any] | None, *, exact: bool) -> list[Finding]:
    """Runs the parts one after the other, with boundaries between them, as far as they do what the whole decoder did."""
    ids, embedding, table = _tokens(parts, root), parts.embedding_of(root), parts.table(root)
    x: Tensor | None = None  # not known: coefficients are made up
    if embedding is not None and is_here(embedding.weight):
        x = embedding(ids) if table is None else embedding(ids) + table[:_TIME]
    if exact:
        basis, anchor = root.subspace_basis, root.subspace_anchor
        anchor = anchor if table is None or anchor.positions is not None else with_positions(anchor, table)
        encode, decode = Encode(basis, anchor), Decode(basis, anchor)
    source = parts.embedding
    for seed, (path, module, number) in enumerate(_in_order(parts, root)):
        if not all(map(is_here, module.parameters())):
            x = None
            continue
        if x is None:
            dtype = next(p.dtype for p in root.parameters() if is_here(p) and p.is_floating_point())
            coefficients = torch.randn(*ids.shape, basis.rank, dtype=basis.rows(dtype).dtype, device=ids.device)
            x = decode(coefficients * _size(root), ids).to(dtype)
        calls = whole[0][path] if whole else []
        if whole and len(calls) != 1 and number is not None:
            reason = f"is called {len(calls)} times in a forward pass, expected once, as stages call it"
            return [Finding(path, reason)]
        for given, _ in calls[:1]:
            if share := _apart(given, x):
                if not seed:
                    return [_between(parts, root, x, given)]
                reason = (
                    f"is given something else than the output of {source}, by a share {share:.3g}: move it into a block"
                )
                return [Finding(path, reason)]
        leaving: list[Finding] = []
        _seed(seed, x)
        try:
            with _watched(root, path, module, leaving):
                y = module(x) if number is None else run_blocks(parts, root, x.clone(), only=[number])
        except Exception as error:
            reason = f"does not run as a stage calls it, on activations alone: {type(error).__name__}: {error}"
            return [Finding(path, reason)]
        if not y.isfinite().all():
            return [Finding(path, "returns NaN or infinity for made-up tokens")]
        for _, output in calls[:1]:
            if share := _apart(output, y):
                reason = f"returns something else on its input alone, as a stage calls it, by a share {share:.3g}"
                return [Finding(path, reason)]
        x, source = y, path
        if exact and number is not None and not parts.is_free(number):
            x = decode(encode(y, ids), ids).to(y.dtype)
            if share := _apart(y, x, within=0.2):  # one boundary rounds less than all blocks do
                reason = (
                    f"a share {share:.3g} of its output is lost at the boundary behind it: a gain, bias, dropout or norm behind "
                    f"{parts.attention_output} or {parts.feed_forward_down}, or a factor of the residual stream; build "
                    f"it without, or free it (free_blocks=)"
                )
                return leaving or [Finding(path, reason)]
    logits = getattr(whole[1], "logits", whole[1]) if whole else None
    if isinstance(logits, Tensor) and logits.shape == x.shape:
        if share := _apart(logits, x):
            reason = (
                f"the decoder returns something else than its output, by a share {share:.3g}: move the rest into it"
            )
            return [Finding(parts.head, reason)]
    elif whole and not whole[0][parts.head]:
        message = "check: %s is not called, and no logits are returned: what follows the blocks is not known"
        logger.warning(message, parts.head)
    return []


@contextlib.contextmanager
def _watched(root: nn.Module, path: str, block: nn.Module, found: list[Finding]) -> Iterator[None]:
    """Adds to `found` the modules that are given what is in the subspace, as a projection's output is, and return what is not."""
    basis = getattr(root, "subspace_basis", None)

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if not all(isinstance(x, Tensor) and x.shape[-1:] == (basis.width,) for x in (given, output)):
            return
        if distance(basis, given) <= tolerance(given.dtype) < (share := distance(basis, output)):
            kind = f"{type(module).__name__}({module.extra_repr()})"
            reason = f"{kind} takes a share {share:.3g} of a projection's output out of the subspace: build it without"
            found.append(Finding(f"{path}.{name}", reason))

    with contextlib.ExitStack() as hooks:
        for name, module in block.named_modules():
            if name and basis is not None:
                hook = functools.partial(after, name)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _between(parts: Parts, root: nn.Module, x: Tensor, given: Tensor) -> Finding:
    """Names what stands between the embedding, which gives x with the table of positions, and the first block."""
    added = given - x if given.shape == x.shape else None
    if added is not None:
        factor = float((given * x).sum() / x.square().sum())
        if not _apart(given, factor * x):
            reason = f"it is scaled by {factor:.4g} before the first block: scale its weight instead"
            return Finding(parts.embedding, reason)
        if not _apart(added[0], added[1]):
            for name, rows in (*root.named_parameters(), *root.named_buffers()):
                if rows.dim() == 2 and not _apart(rows[:_TIME].to(added), added[0]):
                    name_of_module = name.removesuffix(".weight")
                    return Finding(name, f"is added to the embedding: name it by positions={name_of_module!r}")
            reason = "something is added to every sequence behind the embedding: name its table by positions="
            return Finding("positions", reason)
    share = f"a share {_apart(given, x):.3g}"
    reason = f"a dropout, norm or other module changes it by {share} before the first block: build the decoder without"
    return Finding(parts.embedding, reason)


def _apart(x: Tensor, y: Tensor, within: float = 1.0) -> float:
    """‖x − y‖ / ‖y‖; 0 where it is at most `within` times the type's tolerance, so that rounding explains it."""
    share = _share(x.to(wide(y)), wide(y))
    return 0.0 if share <= within * tolerance(y.dtype) else share
