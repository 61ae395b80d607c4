"""What breaks the exactness of a boundary, by the names of modules."""

from collections import defaultdict

import torch
from torch import nn

from torch_lowcomm.subspace.anchor import Embedding
from torch_lowcomm.subspace.basis import Basis, without_autocast
from torch_lowcomm.subspace.compare import Finding, compare, distance, is_here, tolerance
from torch_lowcomm.subspace.parts import Parts
from torch_lowcomm.subspace.weights import constrained_weights

_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
_EMBEDDING = {
    "max_norm": "rows are scaled where they are used, which takes the fixed part too",
    "scale_grad_by_freq": "gradients are divided by the counts of a micro-batch's tokens, which depend on the micro-batches",
    "sparse": "gradients are sparse, which no optimizer of the subspace takes",
}


@without_autocast
def check(model: nn.Module) -> list[Finding]:
    """Everything in a constrained model, or in a stage of it, that keeps its boundaries from being exact.

    It looks at modules and parameters. Then it runs the model whole and cut behind each block on eight made-up tokens, in
    training mode, and names the first block at which the two differ. The model is left as it was. Autocast does not count: a
    stage tells of it. A warning names what does not run: blocks whose parameters are sharded or on the meta device, and a decoder
    that has such blocks or cannot be called with tokens alone. Of free blocks (`constrain`'s free_blocks) only the order and what
    they share with other parts count.

    Args:
        model: What `constrain` returned, or a stage that `cut` made of it; any other is a TypeError.

    Returns:
        One `Finding` a thing, each with the module's name and the reason; empty where boundaries are exact.
    """
    parts, _ = constrained_parts(model)
    found = structure(parts, model)
    for weight in constrained_weights(model):
        if weight.is_coordinates or not is_here(weight.parameter):
            continue
        left, dtype = distance(weight.basis, weight.parameter, weight=weight.axis == 0), weight.parameter.dtype
        if not left <= tolerance(torch.float32 if dtype == torch.float64 else dtype):
            found.append(Finding(weight.name, f"a share {left:.3g} of its norm is outside the subspace"))
    return found + compare(parts, model, exact=True)


def constrained_parts(model: nn.Module) -> tuple[Parts, Basis]:
    """The parts and the basis of a constrained model or a stage of it; any other is a TypeError."""
    parts, basis = getattr(model, "subspace_parts", None), getattr(model, "subspace_basis", None)
    if not isinstance(parts, Parts) or not isinstance(basis, Basis):
        raise TypeError(
            f"expected a model that lc.subspace.constrain has returned, got {type(model).__name__} as it was made"
        )
    return parts, basis


def structure(parts: Parts, root: nn.Module) -> list[Finding]:
    """What breaks exactness by what modules and parameters are, before `constrain` changes a decoder and after."""
    found = _shared(parts, root)
    for name, _, module in parts.projections(root):
        dtype = next(module.parameters()).dtype
        if dtype in (torch.float16, torch.bfloat16):
            reason = f"adds to the residual stream in {str(dtype)[6:]}, which rounds it out of the subspace"
            found.append(Finding(name, reason, half=True))
        if module.bias is not None and module.bias.requires_grad:
            reason = "a trained bias leaves the subspace; build the decoder without, or freeze it"
            found.append(Finding(f"{name}.bias", reason))
    return found + _embedding(parts, root) + cut_apart(parts, root)


def cut_apart(parts: Parts, root: nn.Module) -> list[Finding]:
    """What stages of a decoder would not compute or not train, whatever their boundaries are."""
    config = getattr(root, "config", None)
    found = [
        Finding(parts.head, f"config.{name} is {getattr(config, name)}: logits are not the head's output; unset it")
        for name in _LOGITS
        if getattr(config, name, None) not in (None, 1.0)
    ]
    placed = {id(p) for name, p in root.named_parameters(remove_duplicate=False) if parts.place_of(name)}
    reason = (
        "is in no block, embedding, norm or head: no one stage would train it; freeze it where it is not used, or is a table of "
        "positions, which positions= names"
    )
    for name, p in root.named_parameters() if parts.is_whole(root) else ():
        if p.requires_grad and id(p) not in placed:
            found.append(Finding(name, reason))
    return found


def shared_names(parts: Parts, root: nn.Module) -> list[dict[str, str]]:
    """Of each trained parameter that is in two parts or more of a decoder: {part: the parameter's name there}."""
    names: dict[int, dict[str, str]] = defaultdict(dict)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        place = parts.place_of(name)
        if place is not None and parameter.requires_grad:
            names[id(parameter)].setdefault(place, name)
    return [places for places in names.values() if len(places) > 1]


def _shared(parts: Parts, root: nn.Module) -> list[Finding]:
    """Constrained weights that are another module's too, and free ones of two parts, which stages would train apart.

    Not those of one module that its block has under two names; nor of parts that are all on the last stage: free blocks, the norm
    and the head. An embedding's is tied only once it is constrained, which unties it.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    embedding = f"{parts.embedding}.weight"
    constrained = {f"{name}.weight" for name, _, _ in parts.projections(root)} | {embedding}
    behind = {parts.norm, parts.head, *(f"{parts.blocks}.{n}" for n, _ in parts.blocks_of(root) if parts.is_free(n))}

    def is_alias(name: str, other: str) -> bool:
        here, there = (modules[full.rpartition(".")[0]] for full in (name, other))
        return here is there and parts.place_of(name) == parts.place_of(other) and other not in constrained

    found = []
    for those in names.values():
        for name in filter(constrained.__contains__, those):
            others = [other for other in those if other != name and not is_alias(name, other)]
            if others and (name != embedding or isinstance(modules[parts.embedding], Embedding)):
                found.append(Finding(name, f"tied to {', '.join(others)}, which the constraint does not hold for"))
    for places in shared_names(parts, root):
        first, *others = places.values()
        if not places.keys() <= behind and constrained.isdisjoint(places.values()):
            found.append(Finding(first, f"is shared with {', '.join(others)}: stages would train it apart"))
    return found


def _embedding(parts: Parts, root: nn.Module) -> list[Finding]:
    """Options of an `nn.Embedding` that the constrained one has not, other rows than its weight's, and trained positions."""
    module, table = parts.embedding_of(root), parts.table(root)
    if module is None:
        return []
    found = [
        Finding(f"{parts.embedding}.{name}", f"is {value}: {reason}")
        for name, reason in _EMBEDDING.items()
        if (value := getattr(module, name, None)) not in (None, False)
    ]
    if table is not None and table.requires_grad:
        reason = "trained positions are added to the embedding; stages know only frozen ones"
        found.append(Finding(str(parts.positions), reason))
    if not found and not isinstance(module, Embedding) and is_here(module.weight):
        with torch.no_grad():
            rows = module.weight[: min(8, len(module.weight))]
            output = module(torch.arange(len(rows), device=rows.device).unsqueeze(0))[0]
        if not torch.allclose(rows, output):
            factor = float(output.norm() / rows.norm())
            found.append(Finding(parts.embedding, f"its output is not its weight's rows (scaled by {factor:.4g})"))
    return found
