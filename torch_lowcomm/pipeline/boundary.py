"""One rank's side of a boundary between two stages: the messages of its tensors, in both directions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torch_lowcomm import _C
from torch_lowcomm.pipeline.cache import Cache, Slot

logger = logging.getLogger("torch_lowcomm")

# A message of each boundary, direction, tensor and micro-batch has a channel of its own: schedules send gradients in another
# order than activations.
TENSORS, CHUNKS, BOUNDARIES = 8, 256, 256
_CODED = (torch.float32, torch.float16, torch.bfloat16)  # tensors of other types travel exact


class Place(NamedTuple):
    """One message of a step at a boundary.

    Attributes:
        gradients: Whether it goes back.
        position: The tensor's place among those that cross the boundary.
        chunk: The micro-batch.
    """

    gradients: bool
    position: int
    chunk: int


class Boundary:
    """The channels of one boundary, made when a tensor first crosses it."""

    def __init__(self, backend: _C.LowcommBackend, peer: int, number: int, *, first: str, cache: Cache | None) -> None:
        """Makes a boundary without channels.

        Args:
            backend: The group.
            peer: The group's rank on the other side.
            number: The index of the stage before the boundary.
            first: The codec of first visits; "": exact.
            cache: What is remembered of samples.
        """
        self._backend, self._peer, self._number = backend, peer, number
        self._first, self._cache = first, cache
        self._channels: dict[tuple[Place, str, bool, torch.dtype, int], _C.Channel] = {}
        self._changes = _Changes(f"boundary {number}")

    def send(self, tensor: torch.Tensor, place: Place, codec: str, samples: list[int] | None = None) -> _C.ChannelMessage:
        """Sends a tensor; nobody reads it afterwards.

        Args:
            tensor: On any device.
            place: Which of the step's messages it is.
            codec: Of the tensor, or with samples of their changes; "": exact.
            samples: With a cache, the number of each row.

        Returns:
            The message, to be waited for.

        Raises:
            ValueError: The tensor has not a row for each sample, a sample is under way, or the place has no channel.
        """
        channel, memory, samples = self._channel(tensor, place, codec, samples, sends=True)
        visited = min((memory.version(sample) for sample in samples), default=0) if memory and self._changes.open else 0
        message = channel.send(tensor.detach().contiguous().cpu(), samples)
        if visited >= 2:
            self._changes.add(*message.change_sums)
        return message

    def recv(self, tensor: torch.Tensor, place: Place, codec: str, samples: list[int] | None = None) -> Receive:
        """Posts the receive of a tensor. Arguments and errors are those of send()."""
        channel, _, samples = self._channel(tensor, place, codec, samples, sends=False)
        return Receive(channel, tensor, samples)

    def _channel(
        self, tensor: torch.Tensor, place: Place, codec: str, samples: list[int] | None, *, sends: bool
    ) -> tuple[_C.Channel, _C.SampleMemory | None, list[int]]:
        """The channel of a tensor's message, its memory, and the samples that it names."""
        if place.position >= TENSORS or place.chunk >= CHUNKS or self._number >= BOUNDARIES:
            raise ValueError(
                f"{self._name(place)}: expected at most {TENSORS} tensors at a boundary, {CHUNKS} micro-batches and "
                f"{BOUNDARIES} boundaries"
            )
        if tensor.dtype not in _CODED:
            codec, samples = "", None
        memory = None
        if samples is not None and self._cache is not None:
            if tensor.dim() == 0 or tensor.shape[0] != len(samples):
                raise ValueError(
                    f"{self._name(place)}: expected a row for each of the {len(samples)} samples of the micro-batch, got shape "
                    f"{tuple(tensor.shape)}"
                )
            channels = tensor.shape[-1] if tensor.dim() > 1 else 1
            memory = self._cache.memory(Slot(self._number, place.position, sends), tensor[0].numel(), channels)
        last = tensor.shape[-1] if tensor.dim() else 1
        key = (place, codec, memory is not None, tensor.dtype, last)
        if key not in self._channels:
            self._channels[key] = _C.Channel(
                self._backend,
                self._peer,
                ((2 * self._number + place.gradients) * TENSORS + place.position) * CHUNKS + place.chunk,
                dtype=tensor.dtype,
                codec=codec,
                first=self._first if memory is not None else "",
                channels=last,
                memory=memory,
                edge=edge_name(self._number, gradients=place.gradients),
                part=f"micro-batch {place.chunk}, tensor {place.position}",
            )
        return self._channels[key], memory, samples or []

    def _name(self, place: Place) -> str:
        return f"{edge_name(self._number, gradients=place.gradients)}, micro-batch {place.chunk}, tensor {place.position}"


def edge_name(boundary: int, *, gradients: bool) -> str:
    """The name of one direction of a boundary in counters, records and errors."""
    return f"{'backward' if gradients else 'forward'} boundary {boundary}"


class Receive:
    """A posted receive, of a tensor on any device."""

    def __init__(self, channel: _C.Channel, tensor: torch.Tensor, samples: Sequence[int]) -> None:
        self._tensor = tensor
        direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        self._host = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._message = channel.recv(self._host.detach(), samples)

    def wait(self) -> None:
        """Blocks until the tensor is there."""
        self._message.wait()
        if self._host is not self._tensor:
            with torch.no_grad():
                self._tensor.copy_(self._host)


class _Changes:
    """How large changes are next to the activations, once each sample has been seen twice; told once where they stay large."""

    _MESSAGES, _LARGE = 16, 0.3  # enough to tell; the share that changes are expected to fall below

    def __init__(self, where: str) -> None:
        self._where = where
        self._values = self._sums = 0.0
        self._count = 0

    @property
    def open(self) -> bool:
        """Whether more messages are wanted."""
        return self._count < self._MESSAGES

    def add(self, values: float, changes: float) -> None:
        """Adds one message's sums of |a| and |a - m|."""
        self._values, self._sums, self._count = self._values + values, self._sums + changes, self._count + 1
        if not self.open and self._sums > self._LARGE * self._values:
            logger.warning(
                "%s: after their second visit the samples still change by %.2f of their activations' size (more than %.1f): "
                "their inputs differ from visit to visit, and a stage without cache=, at 4 bits or more, serves as well",
                self._where,
                self._sums / self._values,
                self._LARGE,
            )
