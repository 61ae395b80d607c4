"""Hand-written pipelines: tensors to another rank, whose gradients come back by autograd."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm._copies import NotCopied
from torch_lowcomm.groups import backend_of
from torch_lowcomm.pipeline.boundary import CHUNKS, EDGES, FIRST_EDGE, TENSORS, Boundary
from torch_lowcomm.pipeline.cache import Cache, expect_cache, list_of
from torch_lowcomm.pipeline.edge_messages import EdgeMessages, Received, ZeroOfSent

Samples = torch.Tensor | Iterable[int] | None


class Edge(NotCopied):
    """This rank's end of an edge to another rank, for pipelines that are written by hand.

        edge = lc.pipeline.Edge(1, forward="gauss2", backward="gauss4", cache=lc.pipeline.Cache())    # on rank 0
        sent = edge.send(module(x), samples=samples)
        sent.backward()                                     # waits for the gradient, and goes on through the module

        edge = lc.pipeline.Edge(0, forward="gauss2", backward="gauss4", cache=lc.pipeline.Cache())    # on rank 1
        y = edge.recv(torch.empty(16, 128, 768), samples=samples)
        loss_of(module(y)).backward()                       # sends the gradient of y

    The n-th send of one end is the n-th receive of the other, in either direction, and gradients find theirs in any order. With
    gradients enabled, which they are at both ends at the same time, the gradient of each floating-point tensor goes back, as
    zeros where autograd has none; under no_grad no gradient does, the codec is `evaluate`, and samples are left alone.

    With a cache both ends compare what they remember before the first message, which waits for the other end. After an error
    both ends refuse messages, with the first cause, until both have called reset().
    """

    _instead = "make a new one"

    def __init__(
        self,
        peer: int,
        channel: int = 0,
        *,
        forward: str | None = None,
        backward: str | None = None,
        first_visit: str | None = "minmax8:bucket=128",
        evaluate: str | None = None,
        cache: Cache | None = None,
        unit: str | None = None,
        group: dist.ProcessGroup | None = None,
        purpose: str = "",
    ) -> None:
        """Makes an end; both ends are given the same options.

        Args:
            peer: The group's rank at the other end.
            channel: 0...254, the same at both ends: the edge's number among those of the two ranks.
            forward: The codec of tensors; of their changes where there is a cache. None: exact, as for the other codecs.
            backward: The codec of gradients.
            first_visit: With a cache, the codec of a sample's first visit.
            evaluate: The codec under no_grad.
            cache: What is remembered of each sample; send() and recv() then need their numbers.
            unit: As `Stage` has it: what codecs code without regard to the rest of a message.
            group: A group of backend lowcomm; None: the default group.
            purpose: Begins the edge's name in errors.

        Raises:
            TypeError, ValueError: As `backend_of`; a codec is unknown, a cache has no forward codec, or there is no such peer,
                channel or unit.
        """
        expect_cache(cache, forward)
        if not 0 <= channel < EDGES:
            raise ValueError(f"channel: expected one of 0...{EDGES - 1}, got {channel}")
        for codec in (forward, backward, first_visit, evaluate):
            if codec is not None:
                _C.Codec(codec)
        self._name = f"{purpose}edge {channel} to rank {peer}"
        self._forward, self._evaluate = forward or "", evaluate or ""
        self._cache = cache
        number, slot = FIRST_EDGE + channel, slot_of(peer, channel)
        self._side = Boundary(
            backend_of(group), peer, number, first=first_visit or "", cache=cache, unit=unit, slot=slot
        )
        self._messages = EdgeMessages(self._side, self._name, backward or "")
        self._first_rank = dist.get_rank(group) < peer
        self._compared: int | None = None  # the cache's loads then

    def send(self, x: torch.Tensor | Sequence[torch.Tensor], *, samples: Samples = None) -> torch.Tensor:
        """Sends one tensor or up to 8. Does not wait for the receiver.

        Args:
            x: On any device.
            samples: With a cache, int64 [rows]: the number of each row of a floating-point tensor.

        Returns:
            A float32 zero. Its backward() waits for the gradients of x and goes on through what x was made by; zeros of several
            sends may be added. Call it once for each send: samples are under way until then.

        Raises:
            ValueError: There are too many tensors, a cache and no samples (or none and some), a sample is under way or comes
                twice, or an element cannot be encoded.
            torch.distributed.DistBackendError: The other end has failed or is gone, or the network.
        """
        tensors = _tensors(x)
        coded, numbers = self._message(samples)
        messages = self._messages
        chunk = messages.sent % CHUNKS
        messages.send(tensors, False, chunk, coded, numbers)
        messages.sent += 1
        if not torch.is_grad_enabled():
            return torch.zeros(())
        answered = [tensor if tensor.is_floating_point() else None for tensor in tensors]
        answers = messages.post(answered, True, chunk, messages.backward)
        return ZeroOfSent.apply(messages, chunk, answers, torch.zeros((), requires_grad=True), *tensors)

    def post(self, like: torch.Tensor | Sequence[torch.Tensor], *, samples: Samples = None) -> None:
        """Posts a receive ahead, so that its message costs no round trip; recv() without arguments returns the oldest one.

        Args:
            like: Tensors of the shapes, types and device that come. They are not written.
            samples: As send(), whose errors it raises.
        """
        tensors = _tensors(like)
        coded, numbers = self._message(samples)
        messages = self._messages
        chunk = messages.posted % CHUNKS
        receives = messages.post(tensors, False, chunk, coded, numbers)
        messages.posted += 1
        messages.receives.append((chunk, isinstance(like, torch.Tensor), torch.is_grad_enabled(), receives))

    def recv(self, like: torch.Tensor | Sequence[torch.Tensor] | None = None, *, samples: Samples = None) -> Any:
        """Waits for the next message.

        Args:
            like: As post(); None takes the oldest message that was posted. With posted receives it has to be None.
            samples: As post().

        Returns:
            A tensor, or with a sequence a tuple of them. Their backward sends their gradients, once all have theirs; a loss
            must depend on one of them at least. Errors are those of send().
        """
        receives = self._messages.receives
        if (like is None) != bool(receives):
            raise ValueError(
                f"{self._name}: expected recv() without arguments for the {len(receives)} posted receives, or none "
                f"posted and `like`, got {'none' if like is None else 'like'}"
            )
        if like is not None:
            self.post(like, samples=samples)
        chunk, single, gradients, oldest = receives.popleft()
        self._messages.wait(oldest)
        tensors = [receive.tensor for receive in oldest]
        if gradients:
            tensors = Received.apply(self._messages, chunk, torch.zeros((), requires_grad=True), *tensors)
        return tensors[0] if single else tuple(tensors)

    def finish(self) -> None:
        """Waits until all that was sent is through; raises as send(), also where a gradient could not be encoded."""
        self._messages.finish()

    def fail(self, why: str) -> None:
        """Tells the other end that this one goes no further: both refuse messages from now on, with the first cause."""
        self._messages.fail(why)

    @property
    def failed(self) -> str:
        """Why an end has failed; "" where messages are taken."""
        return self._side.withdrawn

    def reset(self) -> None:
        """Begins anew after an error; both ends call it. Nothing is under way then, and both caches are equal. Raises
        DistBackendError where the peer or the network failed, or the group has ended.
        """
        self._messages.begin()
        self._compared = None
        self._side.resume()
        if self._cache is not None:
            self._cache.recover()
        self._compare()

    def _compare(self) -> None:
        """Both ends forget samples that they remember differently; the same way first on both."""
        if self._cache is None:
            return
        for lower_sends in (True, False):
            self._side.compare({}, sends=lower_sends == self._first_rank)
        self._compared = self._cache.loads

    def _message(self, samples: Samples) -> tuple[str, list[int] | None]:
        """The codec of the next message, and its samples where they are remembered."""
        if not torch.is_grad_enabled():
            return self._evaluate, None
        if samples is None or self._cache is None:
            if samples is None and self._cache is None:
                return self._forward, None
            raise ValueError(
                f"{self._name}: expected samples= with a cache, and none without, got "
                f"{'no samples' if samples is None else 'samples'} {'with' if self._cache else 'without'} one"
            )
        # Where an end has failed the message tells the cause.
        if self._compared != self._cache.loads and not self._side.withdrawn:
            self._compare()
        return self._forward, list_of(samples)


def slot_of(peer: int, channel: int) -> int:
    """The number of an edge in a cache, which may have edges to several ranks."""
    return FIRST_EDGE + peer * EDGES + channel


def _tensors(x: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    tensors = [x] if isinstance(x, torch.Tensor) else list(x)
    if not 1 <= len(tensors) <= TENSORS:
        raise ValueError(f"expected 1 to {TENSORS} tensors in a message, got {len(tensors)}")
    return tensors
