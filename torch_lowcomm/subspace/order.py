"""Whether a decoder computes what its parts do, one after the other, which is what stages compute."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from torch_lowcomm.subspace import probe
from torch_lowcomm.subspace.families import run_blocks
from torch_lowcomm.subspace.parts import Parts
from torch_lowcomm.subspace.probe import Finding

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Calls:
    """The calls of some parts in one forward pass: (path, first input, output), in order."""

    made: list[tuple[str, torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)

    def watch(self, hooks: contextlib.ExitStack, path: str, module: nn.Module) -> None:
        inputs: list[torch.Tensor] = []

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs.append((args[0] if args else kwargs["hidden_states"]).clone())  # which a module may write to

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self.made.append((path, inputs.pop(), (output[0] if isinstance(output, tuple) else output).clone()))

        hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        hooks.callback(module.register_forward_hook(after).remove)

    def of(self, path: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(given, output) for at, given, output in self.made if at == path]


def out_of_order(parts: Parts, root: nn.Module) -> list[Finding]:
    """Finds whether a decoder calls embedding, blocks, norm and head once each, in this order, on the output of the one before.

    The decoder runs once on two rows of made-up tokens, in evaluation mode, and is left as it was.

    Returns:
        Nothing for a stage, and for a decoder that cannot be called with tokens alone, which is logged, or whose weights are not
        all here.
    """
    here = dict(root.named_modules(remove_duplicate=False))
    if not _whole(parts, here):
        return []
    ids = probe.tokens(parts, root)
    if ids is None:
        return []
    calls = _Calls()
    with probe.as_it_was(root, ids.device), contextlib.ExitStack() as hooks:
        root.eval()
        for number, block in parts.blocks_of(root):
            calls.watch(hooks, f"{parts.blocks}.{number}", block)
        for path in (parts.norm, parts.head):
            calls.watch(hooks, path, here[path])
        try:
            result = root(*probe.arguments(root, ids))
        except Exception as error:
            if hasattr(root, "subspace_parts"):  # constrain checks a decoder before it changes it, too
                logger.warning(
                    "check: %s could not be called with tokens alone, [2, %d]: what it computes besides its parts is not known "
                    "(%s: %s)",
                    *(type(root).__name__, ids.shape[1], type(error).__name__, error),
                )
            return []
    with probe.as_it_was(root, ids.device):
        root.eval()
        return _of_blocks(parts, root, calls) or _behind(parts, here, calls, result)


def left_out(parts: Parts, root: nn.Module) -> list[Finding]:
    """Trained parameters of a whole decoder that are in none of its parts, which no stage would have."""
    if not _whole(parts, dict(root.named_modules(remove_duplicate=False))):
        return []
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names[id(parameter)].append(name)
    return [
        Finding(
            those[0],
            "is in no block, embedding, norm or head: no one stage would train it; freeze it where it is not used",
        )
        for those in names.values()
        if not any(parts.place_of(name) for name in those)
    ]


def _whole(parts: Parts, here: dict[str, nn.Module]) -> bool:
    """Whether a module of these parts is a decoder, and not a stage."""
    return parts.norm in here and parts.head in here and parts.embedding in here


def _of_blocks(parts: Parts, root: nn.Module, calls: _Calls) -> list[Finding]:
    paths = [f"{parts.blocks}.{number}" for number, _ in parts.blocks_of(root)]
    for path in paths:
        if (count := len(calls.of(path))) != 1:
            return [Finding(path, f"is called {count} times in a forward pass; stages call each block once")]
    order = [path for path, *_ in calls.made if path in paths]
    if order != paths:
        return [Finding(parts.blocks, f"are called in the order {', '.join(order)}; stages call them by their numbers")]
    before = None
    for path, (number, _) in zip(paths, parts.blocks_of(root), strict=True):
        ((given, output),) = calls.of(path)
        if before is not None and (share := _apart(given, before)):
            reason = f"is given something else than the output of the block before it, by a share {share:.3g}"
            return [Finding(path, reason)]
        if not output.isfinite().all():
            return [Finding(path, "returns NaN or infinity for made-up tokens")]
        try:
            again = run_blocks(parts, root, given.clone(), only=[number])
        except Exception as error:
            if not parts.is_free(number):
                return []  # probe.leaving names the block
            reason = f"does not run as a stage calls it, on activations alone: {type(error).__name__}: {error}"
            return [Finding(path, reason)]
        if share := _apart(again, output):
            reason = f"returns something else where a stage calls it, by a share {share:.3g}: it is given more than its input"
            return [Finding(path, reason)]
        before = output
    return []


def _behind(parts: Parts, here: dict[str, nn.Module], calls: _Calls, result: Any) -> list[Finding]:
    """Of the norm and the head, where the decoder calls them as modules, and of what it returns."""
    x = [output for path, _, output in calls.made if path not in (parts.norm, parts.head)][-1]
    for path, after in ((parts.norm, "the last block"), (parts.head, parts.norm)):
        made = calls.of(path)
        if made and (share := _apart(made[0][0], x)):
            return [Finding(path, f"is given something else than the output of {after}, by a share {share:.3g}")]
        x = here[path](x)
    logits = result if isinstance(result, torch.Tensor) else getattr(result, "logits", None)
    comparable = isinstance(logits, torch.Tensor) and logits.shape == x.shape and bool(x.isfinite().all())
    if comparable and (share := _apart(logits, x)):
        return [Finding(parts.head, f"the decoder returns something else than its output, by a share {share:.3g}")]
    return []


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    """‖x − y‖ / ‖y‖; 0 where rounding explains it."""
    if x.shape != y.shape:
        return float("inf")
    share = float((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30))
    return 0.0 if share <= probe.tolerance(y.dtype) else share
