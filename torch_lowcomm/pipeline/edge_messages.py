"""What is under way over one end of an edge: its messages, and the gradients that autograd sends and receives for them."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from torch_lowcomm import _C
from torch_lowcomm.pipeline.boundary import Boundary, Message, Place, Receive, wait_for

Tensors = Sequence[torch.Tensor | None]
Numbers = list[int] | None  # of samples


class EdgeMessages:
    """The messages of one end, whose gradients have the codec `backward`. An error fails both ends, and begins with `name`."""

    def __init__(self, side: Boundary, name: str, backward: str) -> None:
        self._side, self._name, self.backward = side, name, backward
        self.begin()

    def begin(self) -> None:
        """No message has been sent or posted."""
        self.sent = self.posted = 0
        self._sends: dict[tuple[bool, int], Sequence[Message]] = {}  # (whether of gradients, chunk)
        # Not taken yet: (chunk, whether it is of one tensor, whether gradients go back, the receives).
        self.receives: deque[tuple[int, bool, bool, Sequence[Receive]]] = deque()

    def fail(self, why: str) -> None:
        """Tells the other end that this one goes no further."""
        self._side.withdraw(why)
        self.begin()

    def send(self, tensors: Tensors, gradients: bool, chunk: int, codec: str, samples: Numbers = None) -> None:
        """Sends tensors as a chunk of an edge's messages, or of gradients. None is left out."""
        # Its channels are those of the message that many before, which is through unless the other end is as far behind.
        self.wait(self._sends.pop((gradients, chunk), []))
        sent = self._begun(self._side.send, tensors, gradients, chunk, codec, samples)
        self._sends[gradients, chunk] = [message for message in sent if message is not None]

    def post(self, like: Tensors, gradients: bool, chunk: int, codec: str, samples: Numbers = None) -> list[Any]:
        """Posts the receives of tensors like these; None of None."""
        empty = [None if tensor is None else torch.empty_like(tensor).detach() for tensor in like]
        return self._begun(self._side.recv, empty, gradients, chunk, codec, samples)

    def finish(self) -> None:
        """Waits until all that was sent is through."""
        sends, self._sends = self._sends, {}
        for messages in sends.values():
            self.wait(messages)

    def _begun(
        self, begin: Callable[..., Any], tensors: Tensors, gradients: bool, chunk: int, codec: str, samples: Numbers
    ) -> list[Any]:
        """What `begin` makes of each tensor at its place; None of None. A mistake in the first leaves the edge as it is."""
        messages: list[Any] = []
        try:
            for i, tensor in enumerate(tensors):
                # Only the rows of floating-point numbers are remembered.
                rows = samples if tensor is not None and tensor.is_floating_point() else None
                messages.append(None if tensor is None else begin(tensor, Place(gradients, i, chunk), codec, rows))
        except Exception as error:
            if messages or isinstance(error, RuntimeError):
                self.fail(str(error))
            raise
        for message in messages:
            if isinstance(message, _C.ChannelMessage) and message.spoilt:
                self.wait([message])  # told now
        return messages

    def wait(self, messages: Sequence[Message]) -> None:
        """Waits for messages."""
        try:
            for message in messages:
                wait_for(message, self._name)
        except Exception as error:
            self.fail(str(error))
            raise

    def take_gradients(self, chunk: int, answers: list[Receive | None]) -> list[torch.Tensor | None]:
        """Waits for the gradients that answer a send; autograd calls this."""
        # No gradient answers what was refused: that is told now, not at the deadline.
        self.wait(self._sends.pop((False, chunk), []))
        self.wait([answer for answer in answers if answer is not None])
        return [None if answer is None else answer.tensor for answer in answers]


class ZeroOfSent(torch.autograd.Function):
    """A zero whose backward receives the gradients of what was sent."""

    @staticmethod
    def forward(
        ctx: Any,
        messages: EdgeMessages,
        chunk: int,
        answers: list[Receive | None],
        anchor: torch.Tensor,
        *x: torch.Tensor,
    ) -> Any:
        """Returns the zero."""
        ctx.messages, ctx.chunk, ctx.answers = messages, chunk, answers
        return anchor.clone()  # needs a gradient whether or not x does: both ends send what both expect

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        """Returns the gradients of what was sent."""
        return (None, None, None, None, *ctx.messages.take_gradients(ctx.chunk, ctx.answers))


class Received(torch.autograd.Function):
    """What was received, whose backward sends its gradients."""

    @staticmethod
    def forward(ctx: Any, messages: EdgeMessages, chunk: int, anchor: torch.Tensor, *y: torch.Tensor) -> Any:
        """Returns the tensors as they are."""
        ctx.messages, ctx.chunk = messages, chunk
        ctx.floats = [tensor.is_floating_point() for tensor in y]
        ctx.mark_dirty(*y)  # they are returned as they are
        ctx.mark_non_differentiable(*(tensor for tensor in y if not tensor.is_floating_point()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Sends the gradients of floating-point tensors."""
        sent = [gradient if floats else None for gradient, floats in zip(gradients, ctx.floats, strict=True)]
        ctx.messages.send(sent, True, ctx.chunk, ctx.messages.backward)
        return (None, None, None, *(None for _ in gradients))
