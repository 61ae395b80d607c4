"""Finds the parameters whose values an evaluation reads as they are, and not by way of their modules."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# What returns no tensor and yet has values of one; other functions without a tensor return its shape, type or place.
_READ_VALUES = ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "equal", "allclose")


class RawReads(TorchFunctionMode):
    """Notes the parameters that torch's functions take inside this context.

    Args:
        numbers: A number by the id() of a parameter.

    Attributes:
        found: The numbers of parameters whose values were read.
    """

    def __init__(self, numbers: Mapping[int, int]) -> None:
        super().__init__()
        self._numbers = numbers
        self.found: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the function as it is."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        is_like = name.startswith("new_") or name.endswith("_like")  # of a shape, type and place, without its values
        if name in _READ_VALUES or (next(_tensors(result), None) is not None and not is_like):
            taken = (self._numbers.get(id(tensor)) for tensor in _tensors((args, kwargs)))
            self.found.update(number for number in taken if number is not None)
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
