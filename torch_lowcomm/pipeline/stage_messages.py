"""The messages of one stage of a pipeline: posted ahead, sent at once, waited for where their tensors are needed."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from torch_lowcomm.groups import backend_of
from torch_lowcomm.pipeline.boundary import Boundary, Message, Place, Receive, named, wait_for
from torch_lowcomm.pipeline.boundary_module import BoundaryModule
from torch_lowcomm.pipeline.cache import Cache

OpsOf = Callable[[int], list[dist.P2POp]]  # of a micro-batch


@dataclasses.dataclass(frozen=True)
class StageCodecs:
    """The codecs of a stage's messages; "" is exact. `cache`, `unit`, `first`: as `lc.pipeline.Stage` takes them."""

    forward: str
    backward: str
    first: str
    evaluate: str
    cache: Cache | None
    unit: str | None


class StageMessages:
    """What a stage sends and receives in a step, and why its last step failed. Of `stage` it asks its place, its peers and
    whether it has a backward pass.
    """

    def __init__(self, stage: PipelineStage, module: BoundaryModule, codecs: StageCodecs) -> None:
        self._stage: PipelineStage = weakref.proxy(stage)  # which has this object
        self._module, self._codecs = module, codecs
        self._name = f"stage {stage.stage_index}"
        self._backend = backend_of(stage.group)
        self._boundaries: dict[int, Boundary | None] = {}
        self._receives: dict[tuple[bool, int], list[Receive]] = {}  # (whether of gradients, micro-batch)
        self._posted: set[tuple[bool, int]] = set()
        self._sends: dict[tuple[bool, int], list[Message]] = {}
        # By micro-batch, the numbers that the module gives and those that came from the stage before.
        self._own: dict[int, torch.Tensor] = {}
        self._received: dict[int, torch.Tensor] = {}
        self.samples: list[list[int]] | None = None  # by micro-batch, of the step in progress
        self.failure = ""  # why the last step failed

    @property
    def boundaries(self) -> list[Boundary]:
        """This rank's sides of the boundaries before and behind the stage that have the other on another rank."""
        index = self._stage.stage_index
        return [side for number in (index - 1, index) if (side := self.boundary(number)) is not None]

    def boundary(self, number: int) -> Boundary | None:
        """This rank's side of the boundary behind stage `number`; None at an end, and where both stages are on this rank."""
        if number not in self._boundaries:
            other = number + 1 if number == self._stage.stage_index else number
            peer = self._stage.stage_index_to_group_rank.get(other, self._stage.group_rank)
            side, c = None, self._codecs
            if peer != self._stage.group_rank:
                side = Boundary(self._backend, peer, number, first=c.first, cache=c.cache, unit=c.unit)
            self._boundaries[number] = side
        return self._boundaries[number]

    def boundary_to(self, other: int) -> Boundary:
        """The same by the number of the stage on its other side, which is on another rank."""
        side = self.boundary(min(self._stage.stage_index, other))
        assert side is not None
        return side

    def post(self, gradients: bool, chunk: int, ops_of: OpsOf) -> None:
        """Posts the receives of a micro-batch's activations or gradients, once, into the tensors of torch's `ops_of`."""
        if (gradients, chunk) in self._posted or (gradients and not self._stage.has_backward):
            return
        (codec, samples), ops = self._coding(gradients, chunk), ops_of(chunk)
        self._posted.add((gradients, chunk))
        side = self.boundary(self._stage.stage_index if gradients else self._stage.stage_index - 1)
        for position, op in enumerate(ops):
            assert side is not None  # torch gives no op where both stages are on this rank
            place = Place(gradients, position, chunk)
            with self.failing(), named(self._name, side.name_of(place)):
                receive = side.recv(op.tensor, place, codec, samples)
            self._receives.setdefault((gradients, chunk), []).append(receive)
        if side is not None and not gradients and (names := self._module.message_context_names):
            numbers = self._received[chunk] = torch.empty(len(names), dtype=torch.int64)
            with self.failing():
                self._receives.setdefault((False, chunk), []).append(Receive(side.context(chunk), numbers, []))

    def send(self, gradients: bool, chunk: int, ops: Sequence[dist.P2POp]) -> None:
        """Sends a micro-batch's gradients, or activations, and behind these the numbers that the next stage compares."""
        codec, samples = self._coding(gradients, chunk)
        side = self.boundary(self._stage.stage_index - 1 if gradients else self._stage.stage_index)
        for position, op in enumerate(ops):
            assert side is not None
            place = Place(gradients, position, chunk)
            with self.failing(), named(self._name, side.name_of(place)):
                refuses = self._module.message_finite and not codec and not gradients
                if refuses and not torch.isfinite(op.tensor).all():
                    raise ValueError("expected finite activations, got NaN or infinity")
                message = side.send(op.tensor, place, codec, samples)
            if message.spoilt:  # raised now
                self._wait([message])
            self._sends.setdefault((gradients, chunk), []).append(message)
        if side is not None and not gradients and self._module.message_context_names:
            with self.failing():
                numbers = self._own.pop(chunk)
                self._sends.setdefault((False, chunk), []).append(side.context(chunk).send(numbers, []))

    def wait(self, gradients: bool, chunk: int) -> None:
        """Waits for a micro-batch's activations or gradients, and forgets their receives."""
        if gradients:  # none answers an activation that was refused: that is raised now, not at the deadline
            self._wait(self._sends.pop((False, chunk), []))
        self._wait(self._receives.pop((gradients, chunk), []))

    def compare_context(self, chunk: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Forms a micro-batch's numbers, and compares them with those that came with its activations."""
        names = self._module.message_context_names
        if not names:
            return
        numbers = self._module.message_context(*args, **kwargs)
        own = self._own[chunk] = torch.tensor([numbers[name] for name in names], dtype=torch.int64)
        received = self._received.pop(chunk, own)
        for name, mine, others in zip(names, own.tolist(), received.tolist(), strict=True):
            if mine != others:
                raise ValueError(
                    f"micro-batch {chunk}: {name}: expected the same as at the stage before, which has {others:#x}, got {mine:#x}"
                )

    def finish(self) -> None:
        """Waits until all that the step has sent has arrived."""
        sends, self._sends = self._sends, {}
        for messages in sends.values():
            self._wait(messages)
        self._posted.clear()

    def fail(self, why: str) -> None:
        """Ends the step, and refuses others until `resume`. The stages next to this one are told why, and fail too."""
        if self.failure:
            return
        self.failure = next((cause for side in self.boundaries if (cause := side.withdrawn)), why)
        for side in self.boundaries:
            side.withdraw(self.failure)
        self._forget()

    def resume(self) -> None:
        """Lets the boundaries take messages again, once the stages next to this one have failed too."""
        self._forget()
        for side in self.boundaries:
            side.resume()

    def expect_none_failed(self) -> None:
        """At the beginning of a step: raises RuntimeError where an earlier one failed, here or at a stage next to this one."""
        if self._receives:
            self.fail(f"{self._name}: the step before was broken off")
        for side in self.boundaries:
            if side.withdrawn:
                self.fail(side.withdrawn)
        if self.failure:
            raise RuntimeError(
                f"{self._name}: a message of an earlier step failed; call lc.pipeline.reset(schedule) on all ranks, or make a "
                f"new group and new stages, which may have the same cache. The failure: {self.failure}"
            )

    @contextlib.contextmanager
    def failing(self, doing: str = "") -> Iterator[None]:
        """The stage fails where the body does; with `doing` the cause is it and the module's error."""
        try:
            yield
        except Exception as error:
            cause = error.__cause__ or error  # torch's error has all tensors of the stage in its text
            self.fail(f"{self._name}: {doing}: {type(cause).__name__}: {cause}" if doing else str(error))
            raise

    def _coding(self, gradients: bool, chunk: int) -> tuple[str, list[int] | None]:
        """The codec of a micro-batch's activations or gradients, and its samples where they are remembered."""
        if gradients:
            return self._codecs.backward, None
        if not self._stage.has_backward:
            return self._codecs.evaluate, None
        if self._codecs.cache is None:
            return self._codecs.forward, None
        if self.samples is None:
            raise ValueError("a step with a cache: expected samples= by lc.pipeline.step(), got none")
        return self._codecs.forward, self.samples[chunk]

    def _wait(self, messages: Sequence[Message]) -> None:
        with self.failing():
            for message in messages:
                wait_for(message, self._name)

    def _forget(self) -> None:
        self._receives.clear()
        self._sends.clear()
        self._posted.clear()
        self._own.clear()
        self._received.clear()
