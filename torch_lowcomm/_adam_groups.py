"""Parameter groups of optimizers of Adam's kind: their checks, and their numbers as the core takes them."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Groups = Iterable[Mapping[str, Any]]


def expect_in_range(who: str, group: Mapping[str, Any]) -> None:
    """Raises ValueError for a hyper-parameter out of its range; schedulers may have set it."""
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[name]) < float("inf"):
            raise ValueError(f"{who}: {name}: expected a finite number of 0 or more, got {group[name]}")
    if len(group["betas"]) != 2 or not all(0 <= float(beta) < 1 for beta in group["betas"]):
        raise ValueError(f"{who}: betas: expected two numbers in [0, 1), got {group['betas']}")


def expect_usable(
    who: str, groups: Groups, trained: Sequence[torch.Tensor], name_of: Callable[[torch.Tensor], str]
) -> None:
    """Raises ValueError where a step would not do: a number out of its range, a gradient of a parameter that was frozen.
    `trained` are the parameters that required gradients when they were added.
    """
    known = {id(p) for p in trained}
    for group in groups:
        expect_in_range(who, group)
        for p in group["params"]:
            if p.grad is not None and id(p) not in known:
                raise ValueError(
                    f"{who}: step: {name_of(p)}: expected gradients of the {len(known)} parameters that required them when "
                    f"they were added, got one of another"
                )


def rules_of(groups: Groups) -> list[tuple[float, float, float, float, float]]:
    """(lr, β1, β2, eps, weight_decay) of each group."""
    return [(float(g["lr"]), *map(float, g["betas"]), float(g["eps"]), float(g["weight_decay"])) for g in groups]


def inverse_of(grad_scale: torch.Tensor) -> float:
    """Returns 1 / a gradient scaler's scale, as the scaler computes it."""
    return grad_scale.double().reciprocal().float().item()


@contextmanager
def loading(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], trained: Sequence[torch.Tensor]
) -> Iterator[list[Mapping[str, Any]]]:
    """Loads the parameter groups of a state; where the block raises they are as before. The block loads the optimizer's own
    state: it is given what `state_dict` has of each trained parameter, an empty mapping where it has none.
    """
    load = functools.partial(torch.optim.Optimizer.load_state_dict, optimizer)
    before = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    load({"state": {}, "param_groups": state_dict["param_groups"]})
    try:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        given = dict(zip((id(p) for g in optimizer.param_groups for p in g["params"]), numbers, strict=True))
        yield [state_dict["state"].get(given[id(p)], {}) for p in trained]
    except Exception:
        load({"state": {}, "param_groups": before})
        raise
