"""The parameters of a model that an outer loop reads and writes in their place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from torch_lowcomm._reshard import reshard
from torch_lowcomm.diloco.inner_optimizer import parameters_of
from torch_lowcomm.diloco.parameters import local


class ModelParameters:
    """What an outer loop writes: the parameters of its inner optimizer, and the buffers that it averages. After a write FSDP2
    forgets the weights of `model`, if it is known, that it has gathered.
    """

    def __init__(self, inner: torch.optim.Optimizer, buffers: Sequence[torch.Tensor], model: nn.Module | None) -> None:
        self._inner, self._buffers, self._model = inner, buffers, model
        self._at_first = self._places()
        self._shows_outer = False

    def expect_own(self, what: str) -> None:
        """Raises ValueError inside `replaced`, which puts the rank's own parameters back."""
        if self._shows_outer:
            raise ValueError(f"DiLoCoX: {what}: expected the rank's own parameters, got one inside outer_parameters()")

    def expect_in_place(self) -> None:
        """Raises ValueError where parameters are others than at first, of another dtype or in another place."""
        now = self._places()
        if now != self._at_first:
            raise ValueError(
                f"DiLoCoX: step: expected the {len(self._at_first)} parameters that it was made with, got {len(now)}, not all "
                "the same, of the same dtype and in the same place: make a new one where parameters come or go, or the model is "
                "moved or cast"
            )

    @contextmanager
    def written(self, what: str) -> Iterator[None]:
        """A block outside a step, in method `what`, that writes parameters, maybe before it raises; refused inside `replaced`."""
        self.expect_own(what)
        try:
            yield
        finally:
            reshard(self._model)

    @contextmanager
    def replaced(self, show: Callable[[], None]) -> Iterator[None]:
        """Inside the context, which takes no other one, the model has what `show` has written; afterwards the rank's own."""
        if self._shows_outer:
            raise ValueError("DiLoCoX: outer_parameters: expected to be outside of it, got one inside another")
        own = [*map(local, parameters_of(self._inner)), *self._buffers]
        kept = [tensor.clone() for tensor in own]
        with self.written("outer_parameters"):
            show()
        self._shows_outer = True
        try:
            yield
        finally:
            self._shows_outer = False
            with self.written("outer_parameters"), torch.no_grad():
                for tensor, before in zip(own, kept, strict=True):
                    tensor.copy_(before)

    def _places(self) -> list[tuple[int, int, torch.dtype]]:
        return [(id(p), local(p).data_ptr(), p.dtype) for p in parameters_of(self._inner)]
