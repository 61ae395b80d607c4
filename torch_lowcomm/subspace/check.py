"""What breaks the exactness of a boundary, by the names of modules."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from torch_lowcomm.subspace import probe
from torch_lowcomm.subspace.basis import Basis, without_autocast
from torch_lowcomm.subspace.embedding import Embedding
from torch_lowcomm.subspace.order import left_out, out_of_order
from torch_lowcomm.subspace.parts import EMBEDDING, Parts
from torch_lowcomm.subspace.probe import Finding

_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
_HALF = (torch.float16, torch.bfloat16)


@without_autocast
def check(model: nn.Module) -> list[Finding]:
    """Everything in a constrained model, or in a stage of it, that keeps its boundaries from being exact.

    Looked at are: weights that are tied, or have left the subspace; biases of the two projections; dropout, norms and gains
    behind them, and scales of the residual stream itself (each block runs once on four made-up positions, with its gains drawn,
    and is left as it was); tables of positions that are trained; what stands between the embedding and the first block; whether a
    whole decoder is its embedding, blocks, norm and head, one after the other (it runs once on eight made-up tokens; where it
    cannot, a warning says so), and has no other trained parameter; a residual stream in half precision. Blocks whose parameters
    are sharded or on the meta device do not run: check a model before. Of free blocks (`constrain`'s free_blocks) only the order
    and what they share with other parts are looked at. Autocast does not count: a stage tells of it.

    Args:
        model: What `constrain` returned, or a stage that `cut` made of it.

    Returns:
        One `Finding` a thing, each with the module's name and the reason; empty where boundaries are exact.

    Raises:
        TypeError: The model is not constrained.
    """
    parts, basis = constrained_parts(model)
    found = structure(parts, model, basis)
    weights = [(name, module, True) for name, _, module in parts.projections(model)]
    if has_embedding(parts, model):
        weights.append((parts.embedding, model.get_submodule(parts.embedding), False))
    for name, module, is_projection in weights:
        weight = module.weight
        if weight.is_meta or type(weight.data) is not torch.Tensor:
            continue
        left = probe.distance(basis, weight, weight=is_projection)
        if not left <= probe.tolerance(torch.float32 if weight.dtype == torch.float64 else weight.dtype):
            found.append(Finding(f"{name}.weight", f"a share {left:.3g} of its norm is outside the subspace"))
    return found


def constrained_parts(model: nn.Module) -> tuple[Parts, Basis]:
    """The parts and the basis of a constrained model or a stage of it.

    Raises:
        TypeError: The model is not constrained.
    """
    parts, basis = getattr(model, "subspace_parts", None), getattr(model, "subspace_basis", None)
    if not isinstance(parts, Parts) or not isinstance(basis, Basis):
        raise TypeError(
            f"expected a model that lc.subspace.constrain has returned, got {type(model).__name__} as it was made"
        )
    return parts, basis


def has_embedding(parts: Parts, root: nn.Module) -> bool:
    """Whether the embedding is on this stage; it is in a whole decoder."""
    return any(name == parts.embedding for name, _ in root.named_modules())


def structure(parts: Parts, root: nn.Module, basis: Basis) -> list[Finding]:
    """What breaks exactness whatever the weights are, before `constrain` changes a decoder and after."""
    found = (
        _tied(parts, root) + _shared(parts, root) + _half(parts, root) + _biases(parts, root, basis) + head(parts, root)
    )
    if has_embedding(parts, root):
        found += _options(parts, root)
        found += _between(parts, root) or out_of_order(parts, root) or left_out(parts, root)
    for number, block in parts.blocks_of(root):
        if parts.is_free(number):
            continue
        found += probe.leaving(parts, root, basis, number, block)
    return found


def _tied(parts: Parts, root: nn.Module) -> list[Finding]:
    """Constrained weights that are another module's too; the embedding's only once it is constrained, which unties it."""
    names, ids = defaultdict(list), {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
        ids[name] = id(parameter)
    constrained = [f"{name}.weight" for name, _, _ in parts.projections(root)]
    if has_embedding(parts, root) and getattr(root.get_submodule(parts.embedding), "subspace_role", "") == EMBEDDING:
        constrained.append(f"{parts.embedding}.weight")
    modules = dict(root.named_modules(remove_duplicate=False))

    def is_alias(name: str, other: str) -> bool:
        """Whether both are one module, which its block has under two names."""
        here, there = (modules[full.rpartition(".")[0]] for full in (name, other))
        return here is there and parts.place_of(name) == parts.place_of(other) and other not in constrained

    found = []
    for name in constrained:
        # In the place of a weight that is not there are its coordinates (lc.subspace.reparam).
        others = [other for other in names[ids.get(name)] if other != name and not is_alias(name, other)]
        if others:
            found.append(Finding(name, f"tied to {', '.join(others)}, which the constraint does not hold for"))
    return found


def _options(parts: Parts, root: nn.Module) -> list[Finding]:
    """Options of an `nn.Embedding` that the constrained one has not."""
    module = root.get_submodule(parts.embedding)
    reasons = {
        "max_norm": "rows are scaled where they are used, which takes the fixed part too",
        "scale_grad_by_freq": "gradients are divided by the counts of a micro-batch's tokens, which depend on the micro-batches",
        "sparse": "gradients are sparse, which no optimizer of the subspace takes",
    }
    return [
        Finding(f"{parts.embedding}.{name}", f"is {value}: {reason}")
        for name, reason in reasons.items()
        if (value := getattr(module, name, None)) not in (None, False)
    ]


def shared_names(parts: Parts, root: nn.Module) -> list[dict[str, str]]:
    """Of each trained parameter that is in two parts or more of a decoder: {part: the parameter's name there}."""
    names: dict[int, dict[str, str]] = defaultdict(dict)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        place = parts.place_of(name)
        if place is not None and parameter.requires_grad:
            names[id(parameter)].setdefault(place, name)
    return [places for places in names.values() if len(places) > 1]


def _shared(parts: Parts, root: nn.Module) -> list[Finding]:
    """Free weights that two blocks have, or a block and another part; stages would train them apart.

    Free blocks, the norm and the head are all on the last stage, and may share theirs.
    """
    behind = {parts.norm, parts.head, *(f"{parts.blocks}.{n}" for n, _ in parts.blocks_of(root) if parts.is_free(n))}
    constrained = {f"{name}.weight" for name, _, _ in parts.projections(root)} | {f"{parts.embedding}.weight"}
    found = []
    for places in shared_names(parts, root):
        first, *others = places.values()
        if places.keys() <= behind:
            continue
        if first not in constrained and not constrained & set(others):  # those are tied, or the head will be untied
            found.append(Finding(first, f"is shared with {', '.join(others)}: stages would train it apart"))
    return found


def _half(parts: Parts, root: nn.Module) -> list[Finding]:
    found = []
    for name, _, module in parts.projections(root):
        if module.weight.dtype in _HALF:
            dtype = str(module.weight.dtype).removeprefix("torch.")
            found.append(
                Finding(name, f"adds to the residual stream in {dtype}, which rounds it out of the subspace", True)
            )
    return found


def _biases(parts: Parts, root: nn.Module, basis: Basis) -> list[Finding]:
    found = []
    for name, _, module in parts.projections(root):
        if module.bias is None or module.bias.is_meta:
            continue
        if module.bias.requires_grad:
            found.append(
                Finding(f"{name}.bias", "a trained bias leaves the subspace; build the decoder without, or freeze it")
            )
        elif hasattr(module, "subspace_role") and not (left := probe.distance(basis, module.bias)) <= (
            probe.tolerance(module.bias.dtype) if module.bias.dtype in _HALF else 1e-4
        ):
            found.append(Finding(f"{name}.bias", f"a share {left:.3g} of its norm is outside the subspace"))
    return found


def head(parts: Parts, root: nn.Module) -> list[Finding]:
    """What a model of `transformers` does to the head's output, which stages do not."""
    config = getattr(root, "config", None)
    options = [name for name in _LOGITS if getattr(config, name, None) not in (None, 1.0)]
    return [
        Finding(parts.head, f"config.{name} is {getattr(config, name)}: logits are not the head's output")
        for name in options
    ]


def _between(parts: Parts, root: nn.Module) -> list[Finding]:
    """Trained positions, and whatever changes the embedding before the first block."""
    found = []
    table = parts.table(root)
    if table is not None and table.requires_grad:
        found.append(
            Finding(str(parts.positions), "trained positions are added to the embedding; stages know only frozen ones")
        )
    seen = probe.entry(parts, root)
    if seen is None:
        return found
    embedded = seen[0].double()
    module = root.get_submodule(parts.embedding)
    if not isinstance(module, Embedding):
        rows = module.weight.detach()[: embedded.shape[0] * embedded.shape[1]].double()
        if len(rows) == embedded.shape[0] * embedded.shape[1] and not torch.allclose(rows.view_as(embedded), embedded):
            factor = float(embedded.norm() / rows.norm())
            found.append(Finding(parts.embedding, f"its output is not its weight's rows (scaled by {factor:.4g})"))
            return found
    return found + between(parts, root, seen)


def between(parts: Parts, root: nn.Module, seen: tuple[torch.Tensor, torch.Tensor] | None) -> list[Finding]:
    """What stands between the embedding and the first block, other than the table of positions.

    Args:
        parts: Of the decoder.
        root: The decoder.
        seen: What the one gives and the other is given, by `probe.entry`.
    """
    if seen is None:
        return []
    embedded, given = (x.double() for x in seen)
    table = parts.table(root)
    if table is not None:
        embedded = embedded + table.detach()[: embedded.shape[1]].double()
    difference = given - embedded
    limit = probe.tolerance(seen[0].dtype) * float(given.norm())
    if float(difference.norm()) <= limit:
        return []
    factor = float((given * embedded).sum() / embedded.square().sum())
    if float((given - factor * embedded).norm()) <= limit:
        return [Finding(parts.embedding, f"it is scaled by {factor:.4g} before the first block")]
    if torch.allclose(difference[0], difference[1], atol=limit):
        return [_added(root, difference[0])]
    share = float(difference.norm() / embedded.norm())
    reason = f"a dropout, norm or other module changes it by a share {share:.3g} before the first block"
    return [Finding(parts.embedding, reason)]


def _added(root: nn.Module, rows: torch.Tensor) -> Finding:
    """Names the table whose rows are added to every sequence."""
    time, width = rows.shape
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if tensor.dim() != 2 or tensor.shape[1] != width or len(tensor) < time:
            continue
        if torch.allclose(tensor[:time].detach().double(), rows, atol=1e-5):
            if tensor.requires_grad:
                return Finding(name, "trained positions are added to the embedding; stages know only frozen ones")
            return Finding(name, f"is added to the embedding: name it by positions={name.removesuffix('.weight')!r}")
    return Finding(
        "positions", "something is added to every sequence behind the embedding: name its table by positions="
    )
