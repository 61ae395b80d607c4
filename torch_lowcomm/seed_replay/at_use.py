"""Weights that are perturbed where they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.seed_replay.perturbation import Perturbation, copy_all

_LOOK_EVERY = 32  # evaluations; an even number, so that both of a two-sided estimate are alike
# These return no tensor and yet values of one; other functions without a tensor return its shape, type or place.
_READ_VALUES = ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "equal", "allclose")


class _Weights(dict[str, Any]):
    """A module's parameters by name. Attribute access finds them perturbed; `items()` and `values()` do not."""

    def __init__(self, own: dict[str, Any], uses: AtUse) -> None:
        super().__init__(own)
        self._uses = uses

    def __getitem__(self, name: str) -> Any:
        return self._uses.of(self, super().__getitem__(name))


class AtUse(Perturbation):
    """Evaluates a model at w + factor·z, which exists while a layer needs it: peak memory is one module's weights more. The
    model is in eager mode: what a compiler has traced reads no attributes.

    A module that reads `module.weight` during an evaluation, its own or another's, gets a tensor that the core perturbs; with
    `quantized` every use does, as the parameters' own memory is gone. Flat weights of recurrent layers and penalties over
    `model.parameters()` read parameters as they are. The first evaluation, and one of 32 later on, finds these; from then on
    they are perturbed in place and put back from a copy. `numbers` are the parameters' in the core by their id().
    """

    def __init__(
        self, model: nn.Module, core: _C.SeedReplay, numbers: dict[int, int], machine: int, *, quantized: bool
    ) -> None:
        self._core, self._machine, self._quantized = core, machine, quantized
        holders = [m for m in model.modules() if any(id(p) in numbers for p in m._parameters.values())]
        self._own = [(m, m._parameters) for m in holders]
        self._numbers = dict(numbers)
        self._in_place: dict[int, nn.Parameter] = {}  # by number
        self._parameters = {numbers[id(p)]: p for p in model.parameters() if id(p) in numbers}
        self._seen: set[int] = set()
        self._read_raw: set[int] = set()
        self._checked, self._evaluations = False, 0
        self._sample, self._factor = 0, 0.0
        self._last: tuple[_Weights, dict[int, torch.Tensor]] | None = None
        if quantized:
            self._install()

    @contextmanager
    def at(self, sample: int, factor: float) -> Iterator[None]:
        """As `Perturbation.at`."""
        self._sample, self._factor = sample, factor
        copies = [p.detach().clone() for p in self._in_place.values()]
        if not self._quantized:
            self._install()
        try:
            with torch.no_grad():
                for number, parameter in self._in_place.items():
                    parameter.copy_(self._core.perturbed(number, self._machine, sample, factor))
            if factor != 0 and self._evaluations % _LOOK_EVERY == 0:
                with RawReads(self._numbers) as reads:
                    yield
                self._read_raw = reads.found
            else:
                yield
            self._evaluations += factor != 0
        finally:
            self._factor, self._last = 0.0, None
            if not self._quantized:
                self._remove()
            copy_all(copies, to=[*self._in_place.values()])

    def complete(self) -> bool:
        """As `Perturbation.complete`; parameters that were not perturbed will be so in place from now on. It is a ValueError
        where their memory is gone.
        """
        missed = set() if self._checked else set(self._parameters) - self._seen - set(self._in_place)
        missed |= self._read_raw
        self._read_raw = set()
        if not missed:
            self._checked = True
            return True
        self._evaluations = 0  # so that the one that follows is looked at, too
        if self._quantized:
            raise ValueError(
                f"SeedReplay: base: expected a model that reads its weights as attributes of their modules, got {len(missed)} "
                "parameters that an evaluation did not read so: exclude them by requires_grad_(False), and take penalties "
                "over attributes"
            )
        logger.info(
            "SeedReplay: %d parameters are read in other ways than as attributes of their modules, or not at all: they are "
            "perturbed in place, and kept twice meanwhile",
            len(missed),
        )
        for number in missed:
            self._in_place[number] = self._parameters[number]
            self._numbers.pop(id(self._parameters[number]))
        self._checked = True
        return False

    def of(self, weights: _Weights, parameter: Any) -> Any:
        """Returns the tensor that a reader of `parameter`, one of a module's `weights`, gets."""
        number = self._numbers.get(id(parameter))
        if number is None or (self._factor == 0 and not self._quantized):
            return parameter
        self._seen.add(number)
        # A module reads a weight several times (its dtype, its shape). When the next module reads, the tensor is let go.
        if self._last is None or self._last[0] is not weights:
            self._last = (weights, {})
        made = self._last[1]
        if number not in made:
            made[number] = self._core.perturbed(number, self._machine, self._sample, self._factor)
        return made[number]

    def restore(self) -> None:
        """Lets go of the tensors that were made of the weights, which have moved."""
        self._last = None

    def _install(self) -> None:
        for module, own in self._own:
            module.__dict__["_parameters"] = _Weights(own, self)

    def _remove(self) -> None:
        for module, own in self._own:
            module.__dict__["_parameters"] = own


class RawReads(TorchFunctionMode):
    """Finds the parameters whose values torch's functions read inside this context: `found`, of `numbers` by their id()."""

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
