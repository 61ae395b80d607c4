"""Numbers that two stages must have equal in each micro-batch: they travel with its activations."""

from typing import Any

import torch

from torch_lowcomm import _C
from torch_lowcomm.pipeline.boundary import Boundary, Receive
from torch_lowcomm.pipeline.boundary_module import BoundaryModule


class Context:
    """The numbers that a stage's module gives for a micro-batch, compared with those of the stage before.

    A module without `message_context_names` (`BoundaryModule`) has none, and nothing is sent.
    """

    def __init__(self, module: BoundaryModule) -> None:
        """Of the interface of a stage's module."""
        self._module = module
        self.names = module.message_context_names
        self._own: dict[int, torch.Tensor] = {}  # by micro-batch
        self._received: dict[int, torch.Tensor] = {}

    def form(self, chunk: int, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        """Forms a micro-batch's numbers, and compares them with those of the stage before.

        Args:
            chunk: The micro-batch.
            args: Its inputs, on the first stage.
            kwargs: Its keywords.

        Raises:
            ValueError: They differ; with both values.
        """
        if not self.names:
            return
        numbers = self._module.message_context(*args, **(kwargs or {}))
        own = self._own[chunk] = torch.tensor([numbers[name] for name in self.names], dtype=torch.int64)
        received = self._received.pop(chunk, None)
        if received is None:
            return
        for name, mine, others in zip(self.names, own.tolist(), received.tolist(), strict=True):
            if mine != others:
                raise ValueError(
                    f"micro-batch {chunk}: {name}: expected the same as at the stage before, which has {others:#x}, got {mine:#x}"
                )

    def send(self, side: Boundary, chunk: int) -> _C.ChannelMessage:
        """Sends a micro-batch's numbers behind its activations."""
        return side.send_context(self._own.pop(chunk), chunk)

    def recv(self, side: Boundary, chunk: int) -> Receive:
        """Posts the receive of the numbers of the stage before; they are there once it has been waited for."""
        self._received[chunk] = torch.empty(len(self.names), dtype=torch.int64)
        return side.recv_context(self._received[chunk], chunk)

    def clear(self) -> None:
        """Forgets the numbers of a step that has failed."""
        self._own.clear()
        self._received.clear()
