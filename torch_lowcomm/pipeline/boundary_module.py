"""The interface by which a stage's module decides what travels across its boundaries."""

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch

from torch_lowcomm._ddp_around import without_ddp


class BoundaryModule:
    """A module whose stage asks it how its messages travel, as those of `lc.subspace.cut` are asked.

    A module that has all these attributes implements it; with its own values it is what a stage knows of any other module.

    Attributes:
        message_codec: The codec of activations and gradients where `Stage` is given none; None: exact.
        message_finite: Whether exact activations that are not finite are refused, as codecs refuse them.
        message_options: What the next stage's module must have equal, by name; compared in the first step.
        message_context_names: The names of the numbers that `message_context` returns, in order; empty: none travel.
    """

    message_codec: str | None = None
    message_finite: bool = False
    message_options: Mapping[str, str] = {}
    message_context_names: tuple[str, ...] = ()

    def message_context(self, *args: Any, **kwargs: Any) -> Mapping[str, int]:
        """Numbers of a micro-batch, from its inputs on the first stage and its keywords, that the next stage must come to as
        well; they travel with its activations.
        """
        return {}


NAMES = tuple(name for name in vars(BoundaryModule) if name.startswith("message_"))
_ABSENT = object()


def _has(module: torch.nn.Module, name: str) -> bool:
    """Whether a module has an attribute, one of the module that it wraps too; a property is not evaluated."""
    if inspect.getattr_static(module, name, _ABSENT) is not _ABSENT:
        return True
    # What torch.compile and torch's wrappers put around a module passes its attributes on.
    wrapped = (
        getattr(module, inner, None) for inner in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    )
    return any(isinstance(inner, torch.nn.Module) and _has(inner, name) for inner in wrapped)


def boundary_module(submodule: torch.nn.Module) -> BoundaryModule:
    """The interface of a stage's module; one that has a part of it is a TypeError."""
    module = without_ddp(submodule)
    missing = [name for name in NAMES if not _has(module, name)]
    if len(missing) == len(NAMES):
        return BoundaryModule()
    if missing:
        raise TypeError(
            f"{type(module).__name__}: expected all of lc.pipeline.BoundaryModule, got a module without {', '.join(missing)}"
        )
    return cast("BoundaryModule", module)
