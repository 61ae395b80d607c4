"""The interface by which a stage's module decides what travels across its boundaries."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch

from torch_lowcomm._ddp_around import without_ddp


class BoundaryModule(Protocol):
    """A module whose stage asks it how its messages travel, as those of `lc.subspace.cut` are asked.

    Attributes:
        message_codec: The codec of activations and gradients where `Stage` is given none; None: exact.
        message_finite: Whether exact activations that are not finite are refused, as codecs refuse them.
        message_options: What the next stage's module must have equal, by name; compared in the first step.
        message_context_names: The names of the numbers that `message_context` returns, in order; empty: none travel.
    """

    message_finite: bool
    message_context_names: tuple[str, ...]

    @property
    def message_codec(self) -> str | None:
        """See above."""

    @property
    def message_options(self) -> Mapping[str, str]:
        """See above."""

    def message_context(self, *args: Any, **kwargs: Any) -> Mapping[str, int]:
        """Numbers of a micro-batch that the next stage must come to as well; they travel with its activations.

        Args:
            *args: The micro-batch's inputs, on the first stage.
            **kwargs: Its keywords.
        """


class PlainModule:
    """The interface of a module that does not have it."""

    message_finite = False
    message_context_names: tuple[str, ...] = ()
    message_codec: str | None = None
    message_options: Mapping[str, str] = {}

    def message_context(self, *_: Any, **__: Any) -> Mapping[str, int]:
        """Returns no numbers."""
        return {}


NAMES = tuple(name for name in vars(PlainModule) if name.startswith("message_"))
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
    """The interface of a stage's module.

    Raises:
        TypeError: The module has a part of the interface.
    """
    module = without_ddp(submodule)
    missing = [name for name in NAMES if not _has(module, name)]
    if len(missing) == len(NAMES):
        return cast("BoundaryModule", PlainModule())
    if missing:
        raise TypeError(
            f"{type(module).__name__}: expected all of lc.pipeline.BoundaryModule, got a module without {', '.join(missing)}"
        )
    return cast("BoundaryModule", module)
