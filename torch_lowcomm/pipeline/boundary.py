"""One rank's side of a boundary between two stages: the messages of its tensors, in both directions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.codec import CODED
from torch_lowcomm.pipeline.cache import Cache
from torch_lowcomm.pipeline.shapes import of_numbers, room_for, to_numbers
from torch_lowcomm.pipeline.slots import Slot
from torch_lowcomm.pipeline.units import expect_unit, is_shorter, unit_of

# A message of each boundary, direction, tensor and micro-batch has a channel of its own: schedules send gradients in another
# order than activations.
TENSORS, CHUNKS, BOUNDARIES = 8, 256, 256  # of stages; a micro-batch's context takes the last tensor's place
FIRST_EDGE, EDGES = 257, 255  # numbers of hand-written edges' boundaries; number 256 has the comparisons of caches
_COMPARISONS = 1 << 20  # the first of the channels of comparisons, one a boundary


class Place(NamedTuple):
    """One message of a step at a boundary."""

    gradients: bool  # whether it goes back
    position: int  # the tensor's place among those that cross the boundary
    chunk: int  # the micro-batch


class Boundary:
    """The channels of one boundary, made when a tensor first crosses it."""

    def __init__(
        self,
        backend: _C.LowcommBackend,
        peer: int,
        number: int,
        *,
        first: str,
        cache: Cache | None,
        unit: str | None = None,
        slot: int | None = None,
    ) -> None:
        """Makes a boundary without channels; its number is the index of the stage before it, or FIRST_EDGE and on.

        `first` is the codec of first visits, "" for exact. `unit` is as `unit_of` has it. `slot` is the boundary's number in
        the cache where that is another one: edges to several ranks may have one number.
        """
        expect_unit(unit)
        self._backend, self._peer, self.number = backend, peer, number
        self.slot = number if slot is None else slot
        self._block = _C.ChannelBlock(backend, peer, number)
        self._first, self._cache, self._unit = first, cache, unit
        self._channels: dict[tuple[Any, ...], _C.BoundaryChannel] = {}
        self._contexts: dict[int, _C.BoundaryChannel] = {}  # by micro-batch
        self._changes = _Changes(where(number))

    def send(
        self, tensor: torch.Tensor, place: Place, codec: str, samples: list[int] | None = None
    ) -> _C.ChannelMessage:
        """Sends a tensor, on any device; nothing reads it afterwards. Returns the message, to be waited for.

        With a cache `samples` are the numbers of the tensor's rows, none of them under way, and the codec is of their changes;
        "": exact.
        """
        channel, memory, samples = self._channel(tensor, place, codec, samples, sends=True)
        visited = min((memory.version(sample) for sample in samples), default=0) if memory and self._changes.open else 0
        message = channel.send(_on_host(tensor.detach()), samples)
        if visited >= 2:
            self._changes.add(*message.change_sums)
        return message

    def recv(self, tensor: torch.Tensor, place: Place, codec: str, samples: list[int] | None = None) -> Receive:
        """Posts the receive of a tensor. Arguments and errors are those of send()."""
        channel, _, samples = self._channel(tensor, place, codec, samples, sends=False)
        return Receive(channel, tensor, samples)

    def send_shapes(self, shapes: Any) -> None:
        """Sends what torch's stages tell each other, and waits until it is through. A withdrawal ends it, as it ends messages."""
        channel, numbers = self._shapes(), to_numbers(shapes)
        channel.send(torch.tensor([len(numbers)]), []).wait()
        channel.send(numbers, []).wait()

    def recv_shapes(self) -> Any:
        """Waits for the descriptions of tensors that the other side sends."""
        channel, size = self._shapes(), torch.empty(1, dtype=torch.int64)
        channel.recv(size, []).wait()
        numbers = room_for(int(size))
        channel.recv(numbers, []).wait()
        return of_numbers(numbers)

    def _shapes(self) -> _C.BoundaryChannel:
        """The channel of what torch's stages tell each other before their first micro-batch."""
        number = self._number(Place(gradients=True, position=TENSORS - 1, chunk=CHUNKS - 1))
        return self._channel_of_numbers(number, edge=f"shapes of {where(self.number)}")

    def _channel_of_numbers(self, number: int, *, edge: str, part: str = "") -> _C.BoundaryChannel:
        """A channel whose messages are exact int64, and are not remembered."""
        ends = self._backend, self._peer, number
        return _C.BoundaryChannel(
            *ends, dtype=torch.int64, codec="", first="", channels=1, memory=None, edge=edge, part=part
        )

    def _number(self, place: Place) -> int:
        """The channel's number among those between the two ranks, which both sides compute alike."""
        return ((2 * self.number + place.gradients) * TENSORS + place.position) * CHUNKS + place.chunk

    def context(self, chunk: int) -> _C.BoundaryChannel:
        """The channel of the numbers that both sides must have equal in a micro-batch."""
        if chunk not in self._contexts:
            self._contexts[chunk] = self._channel_of_numbers(
                self._number(Place(gradients=False, position=TENSORS - 1, chunk=chunk)),
                edge=f"context of {where(self.number)}",
                part=f"micro-batch {chunk}",
            )
        return self._contexts[chunk]

    def _channel(
        self, tensor: torch.Tensor, place: Place, codec: str, samples: list[int] | None, *, sends: bool
    ) -> tuple[_C.BoundaryChannel, _C.SampleMemory | None, list[int]]:
        """The channel of a tensor's message, its memory, and the samples that it names."""
        most = TENSORS - 1 if self._contexts else TENSORS
        if place.position >= most or place.chunk >= CHUNKS:
            raise ValueError(
                f"{self.name_of(place)}: expected at most {most} tensors at a boundary, {CHUNKS} micro-batches"
            )
        if tensor.dtype not in CODED or not self._is_coded(codec, tensor, place):
            codec, samples = "", None
        memory = None
        if samples is not None and self._cache is not None:
            if tensor.dim() == 0 or tensor.shape[0] != len(samples):
                raise ValueError(
                    f"{self.name_of(place)}: expected a row for each of the {len(samples)} samples of the micro-batch, got shape "
                    f"{tuple(tensor.shape)}"
                )
            channels = tensor.shape[-1] if tensor.dim() > 1 else 1
            unit = unit_of(self._cache.slots.codec, tensor.shape, self._unit, activations=True)
            memory = self._cache.slots.memory(Slot(self.slot, place.position, sends), tensor[0].numel(), channels, unit)
        last = tensor.shape[-1] if tensor.dim() else 1
        answer = ""  # a stage knows whether a gradient answers an activation; the ends of an edge compare it
        if not place.gradients and self.number >= FIRST_EDGE:
            answer = "comes back" if torch.is_grad_enabled() else "none"
        overflow = self._cache.overflow_codec(codec) if memory is not None and self._cache is not None else None
        first = self._first if memory is not None else ""
        units = tuple(
            unit_of(each or "", tensor.shape, self._unit, activations=not place.gradients)
            for each in (codec, first, overflow)
        )
        key = (place, codec, memory is not None, tensor.dtype, last, units, answer)
        if key not in self._channels:
            self._channels[key] = _C.BoundaryChannel(
                self._backend,
                self._peer,
                self._number(place),
                dtype=tensor.dtype,
                codec=codec,
                first=first,
                channels=last,
                units=units,
                memory=memory,
                edge=_way(self.number, gradients=place.gradients),
                part=_part(place),
                gradient=answer,
                overflow=overflow,
            )
        return self._channels[key], memory, samples or []

    def _is_coded(self, codec: str, tensor: torch.Tensor, place: Place) -> bool:
        """Whether codes are shorter than the tensor: those of units of a few elements are not, so these travel exact."""
        if self._unit == "message" or not codec:
            return True
        unit = unit_of(codec, tensor.shape, self._unit, activations=not place.gradients)
        return tensor.dim() >= 2 and is_shorter(codec, unit, tensor.element_size())

    @property
    def withdrawn(self) -> str:
        """Why a side has withdrawn; "" where messages are taken."""
        try:
            return self._block.withdrawn
        except RuntimeError:  # of a group that is over, which its next message says
            return ""

    def withdraw(self, why: str) -> None:
        """Ends what is under way at the boundary, on both sides and for one reason. The first one counts."""
        with contextlib.suppress(RuntimeError):  # of a group that is over: its peers have heard why
            self._block.withdraw(why)

    def resume(self) -> None:
        """Takes messages again, once the other side has withdrawn too and nothing is under way; both sides call it."""
        self._block.resume()
        self._contexts.clear()
        self._channels.clear()  # they take the samples of messages that were dropped for under way

    def compare(self, said: Mapping[str, str], *, sends: bool) -> None:
        """Compares how both sides were made, and forgets samples of activations that go one way where the two differ.

        Both sides call it, and both raise ValueError where they were made differently, or only one of them has a cache. `said`
        is what both must have equal, by name; a name that one side alone has is not compared. `sends` says whether this side
        sends the activations.
        """
        cache = self._cache
        rows = torch.empty(0, 4, dtype=torch.int64) if cache is None else cache.slots.rows(self.slot, sends)
        said = {**said, "cache": "none" if cache is None else cache.options}
        name = where(self.number)
        channel = self._channel_of_numbers(_COMPARISONS + self.number, edge=f"caches of {name}")
        text = torch.tensor(
            list("\n".join(f"{key}={value}" for key, value in said.items()).encode()), dtype=torch.int64
        )
        letters, theirs = _exchange(channel, torch.tensor([len(text), len(rows)]), (2,)).tolist()
        for line in bytes(_exchange(channel, text, (letters,)).tolist()).decode().splitlines():
            key, _, value = line.partition("=")
            if said.get(key, value) != value:
                raise ValueError(
                    f"{name}: {key}: expected the same on both sides, rank {self._backend.rank()} has {said[key]!r}, rank "
                    f"{self._peer} has {value!r}"
                )
        others = _exchange(channel, rows, (theirs, 4))
        if cache is None:
            return
        for why, samples in cache.slots.keep_equal(self.slot, sends, others).items():
            self._backend.count_forgotten(
                f"{'send' if sends else 'recv'} {_way(self.number, gradients=False)}", why, samples
            )

    def name_of(self, place: Place) -> str:
        """The name of a message in errors."""
        return f"{_way(self.number, gradients=place.gradients)}, {_part(place)}"


def _exchange(channel: _C.BoundaryChannel, mine: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The other side's tensor, of `shape`."""
    theirs = torch.empty(shape, dtype=mine.dtype)
    receive = channel.recv(theirs, [])
    send = channel.send(mine.contiguous(), [])
    receive.wait()
    send.wait()
    return theirs


def where(number: int) -> str:
    """The name of a boundary."""
    return f"boundary {number}" if number < FIRST_EDGE else f"edge {number - FIRST_EDGE}"


def _way(number: int, *, gradients: bool) -> str:
    return f"{'backward' if gradients else 'forward'} {where(number)}"


def _part(place: Place) -> str:
    return f"micro-batch {place.chunk}, tensor {place.position}"


def _host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous host memory of its shape and type, pinned for a device's."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in contiguous host memory: the tensor itself where it is that."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    return _host_memory(tensor).copy_(tensor)


class Receive:
    """A posted receive of `tensor`, on any device, which has its values after wait()."""

    def __init__(self, channel: _C.BoundaryChannel, tensor: torch.Tensor, samples: Sequence[int]) -> None:
        self.tensor = tensor
        direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        self._host = tensor if direct else _host_memory(tensor)
        self._message = channel.recv(self._host.detach(), samples)
        self.name: str = self._message.name

    def wait(self) -> None:
        """Blocks until the tensor is there."""
        self._message.wait()
        if self._host is not self.tensor:
            with torch.no_grad():
                self.tensor.copy_(self._host, non_blocking=True)  # pinned: the host goes on to launch kernels


Message = _C.ChannelMessage | Receive


def wait_for(message: Message, owner: str) -> None:
    """Waits for a message; an error names its owner and the message besides its cause."""
    with named(owner, message.name):
        message.wait()


@contextlib.contextmanager
def named(owner: str, message: str) -> Iterator[None]:
    """An error of a message begins with its owner, and has the message's name."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        said = str(error)
        raise type(error)(f"{owner}: {said if message in said else f'{message}: {said}'}") from error


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
                "their inputs differ from visit to visit, or the model still learns fast; where this stays so, a stage without "
                "cache=, at 4 bits or more, serves as well",
                self._where,
                self._sums / self._values,
                self._LARGE,
            )
