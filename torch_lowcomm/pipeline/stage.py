"""A stage of torch's pipelining that sends and receives its own messages.

It overrides what torch's schedules call, and asks torch's own methods for the tensors, in ops that it does not pass on.
tests/torch_names.py lists the names of torch's that it overrides or uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from torch_lowcomm import _C
from torch_lowcomm._copies import NotCopied
from torch_lowcomm.groups import backend_of
from torch_lowcomm.pipeline.boundary import BOUNDARIES, Boundary, Message, Place, Receive, named, wait_for
from torch_lowcomm.pipeline.cache import Cache
from torch_lowcomm.pipeline.context import Context, unwrapped
from torch_lowcomm.pipeline.presets import FIRST, codecs
from torch_lowcomm.pipeline.units import expect_unit


class Stage(NotCopied, PipelineStage):
    """`torch.distributed.pipelining.PipelineStage` for slow links, for every schedule of torch.

    torch posts a receive when it is about to wait for it, and a link with a delay then waits a round trip for each message. This
    stage posts the receives of all micro-batches when a step begins, sends as soon as a tensor exists, and posts the receive of
    a gradient with the activation that it answers. Its messages are exact, or coded; with a cache an activation travels as its
    change since the sample's last visit (AQ-SGD: Wang et al., NeurIPS 2022, Algorithm 2).

    Stages that share a rank pass tensors without a message, as torch's do.
    """

    _instead = "make a new one"

    tells_shapes = hasattr(PipelineStage, "_recv_meta")  # of later torch, whose stages call it

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *args: Any,
        forward: str | None = None,
        backward: str | None = None,
        first_visit: str | None = FIRST,
        evaluate: str | None = None,
        cache: Cache | None = None,
        window: int | None = None,
        unit: str | None = None,
        preset: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Makes a stage; all stages of a pipeline are given the same options.

        Args:
            submodule: The module of this stage. Its attribute `message_codec`, where it has one, is the codec of activations and
                gradients that are given none here; with a true `message_finite` exact activations that are not finite are
                refused, as codecs refuse them; a method `message_context(*args, **kwargs)`, called with a micro-batch's
                inputs (of the first stage alone) and keywords, names numbers that the stage behind must come to as well.
            stage_index: Its place in the pipeline, from 0.
            num_stages: Stages of the pipeline.
            device: Where the module computes.
            *args: As PipelineStage.
            forward: The codec of activations; of their changes where there is a cache. None: exact.
            backward: The codec of gradients. None: exact.
            first_visit: With a cache, the codec of a sample's first visit. None: exact, as in the paper.
            evaluate: The codec of activations in a schedule's eval(). None: exact. It never uses the cache.
            cache: What is remembered of each sample; `lc.pipeline.step` then needs the samples' numbers.
            window: How many micro-batches' receives are posted ahead. None: all of a step.
            unit: What codecs code without regard to the rest of a message, so that no decoded element tells of the rest: "token",
                the last dimension; "sample", all but the first one; "message", nothing. None: a token of a tensor with three
                dimensions, [batch, time, width], else a sample. Tensors of one dimension travel exact, unless "message".
            preset: "paper:2/4", "paper:3/6" or "paper:4/8", in place of `forward`, `backward` and `first_visit`: the bits of
                activations and of gradients in the paper's experiments (section 4), a scale a channel, first visits exact. Such
                scales tell a token of all later ones, which a causal model learns to read: with activations [batch, time, width]
                they need unit="message".
            **kwargs: As PipelineStage.

        Raises:
            ValueError: A codec or preset is unknown, a codec is given with a preset, the group is of another backend, a cache
                has no forward codec, window is below 1, there is no such unit, or there are more than 257 stages.
        """
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        forward, backward, first_visit = codecs(preset, forward, backward, first_visit)
        of_module = getattr(unwrapped(submodule), "message_codec", None)
        forward, backward = (of_module if codec is None else codec for codec in (forward, backward))
        if cache is not None and forward in (None, "none"):
            raise ValueError(f"forward: expected a codec of changes with a cache, got {forward}")
        if num_stages > BOUNDARIES + 1:
            raise ValueError(f"num_stages: expected at most {BOUNDARIES + 1}, got {num_stages}")
        if window is not None and window < 1:
            raise ValueError(f"window: expected 1 or more, got {window}")
        for codec in (forward, backward, first_visit, evaluate):
            if codec is not None:
                _C.Codec(codec)
        self._backend = backend_of(self.group)
        self._forward, self._backward = forward or "", backward or ""
        self._first, self._evaluate = first_visit or "", evaluate or ""
        expect_unit(unit)
        self._cache, self._window, self._unit = cache, window, unit
        # torch does not compare them where both are given.
        given = dict(zip(("input_args", "output_args"), args, strict=False)) | kwargs
        self._inputs, self._outputs = given.get("input_args"), given.get("output_args")
        self._boundaries: dict[int, Boundary | None] = {}
        self._micro_batches: int | None = None
        self._samples: list[list[int]] | None = None  # by micro-batch, of the step under way
        self._receives: dict[tuple[bool, int], list[Receive]] = {}  # (whether of gradients, micro-batch)
        self._posted: set[tuple[bool, int]] = set()
        self._sends: dict[tuple[bool, int], list[Message]] = {}
        self._context = Context(submodule)
        self._finite: bool = getattr(unwrapped(submodule), "message_finite", False)
        self._failed = ""  # why the last step failed
        self.begun = False  # torch's stages have told each other their shapes
        self.in_micro_batch = (
            False  # the module runs on one, and not on made-up tensors whose shapes torch wants to know
        )

    @property
    def cache(self) -> Cache | None:
        """The memory of this stage's samples; None without one."""
        return self._cache

    @property
    def boundaries(self) -> list[Boundary]:
        """This rank's sides of the boundaries before and behind the stage that have the other on another rank."""
        return [
            side for number in (self.stage_index - 1, self.stage_index) if (side := self._boundary(number)) is not None
        ]

    def said(self, *, sends: bool) -> dict[str, str]:
        """What the stage behind this one, or with `sends` false before it, must have been told too; `lc.pipeline.step` compares.

        Returns:
            The number of stages; where torch was given them, the tensors of a micro-batch that cross the boundary; and what the
            module says of its boundaries, in an attribute `message_options`.
        """
        tensors = self._outputs if sends else self._inputs
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ())
        shapes = ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
        options: dict[str, str] = getattr(unwrapped(self.submod), "message_options", {})
        return (
            {"stages": str(self.num_stages), "unit": str(self._unit)}
            | options
            | ({"tensors": shapes} if shapes else {})
        )

    def fail(self, why: str) -> None:
        """Ends the step, and refuses others until reset(); stages next to this one hear why, and fail in turn."""
        if self._failed:
            return
        self._failed = next((cause for side in self.boundaries if (cause := side.withdrawn)), why)
        for side in self.boundaries:
            side.withdraw(self._failed)
        self._forget_messages()

    def resume(self) -> None:
        """Takes steps again, once the stages next to this one have failed too; `lc.pipeline.reset` calls this.

        Raises:
            torch.distributed.DistBackendError: A peer or the network failed.
        """
        self._forget_messages()
        for side in self.boundaries:
            side.resume()
        if self._cache is not None:
            self._cache.recover()
        super().clear_runtime_states()
        for state in (self.bwd_cache, self.backward_state, self.dw_runner):
            state.clear()
        # Later torch lends each receive a tensor that its micro-batch gives back, and refuses another receive until then.
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            for info in infos:
                if hasattr(info, "take_buffer"):
                    info.buffer = None
        self._failed = ""

    def _forget_messages(self) -> None:
        self._receives.clear()
        self._sends.clear()
        self._posted.clear()
        self._context.clear()

    def expect_micro_batches(self, count: int) -> None:
        """Refuses a schedule of another number of micro-batches: torch keeps the buffers of the first one's.

        Raises:
            ValueError: The stage has been in a schedule of another number.
        """
        if self._micro_batches not in (None, count):
            raise ValueError(
                f"stage {self.stage_index}: expected a schedule of {self._micro_batches} micro-batches, as before, got {count}"
            )
        self._micro_batches = count

    def set_samples(self, samples: list[list[int]] | None) -> None:
        """The numbers of the next step's samples, by micro-batch; `lc.pipeline.step` calls this."""
        self._samples = samples

    def finish(self) -> None:
        """Waits until all that the step has sent is through.

        Raises:
            ValueError: An activation or gradient could not be encoded.
            torch.distributed.DistBackendError: A peer or the network failed, or the two sides mean different messages.
        """
        sends, self._sends = self._sends, {}
        for messages in sends.values():
            self._wait(messages)
        self._posted.clear()

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        """Tells another stage the shapes of what crosses their boundary; torch calls this in the first step.

        By a channel, on which a stage that fails meanwhile is heard: torch's own messages would wait for it.
        """
        with self._failing():
            self._boundary_to(dst_stage).send_shapes(meta)

    def _recv_meta(self, src_stage: int) -> Any:
        """Waits for what another stage tells."""
        with self._failing():
            return self._boundary_to(src_stage).recv_shapes()

    def _boundary_to(self, other: int) -> Boundary:
        side = self._boundary(min(self.stage_index, other))
        assert side is not None
        return side

    def clear_runtime_states(self) -> None:
        """Begins a step; torch's schedules call this.

        Raises:
            RuntimeError: An earlier step failed, here or at a stage next to this one.
        """
        if self._receives:
            self.fail(f"stage {self.stage_index}: the step before was broken off")
        for side in self.boundaries:
            if side.withdrawn:
                self.fail(side.withdrawn)
        if self._failed:
            raise RuntimeError(
                f"stage {self.stage_index}: a message of an earlier step failed; call lc.pipeline.reset(schedule) on all ranks, "
                f"or make a new group and new stages, which may have the same cache. The failure: {self._failed}"
            )
        self.finish()
        super().clear_runtime_states()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Posts the receives of activations; torch is given none."""
        self.begun = True
        ahead = len(self.args_recv_info) if self._window is None else self._window
        for chunk in range(fwd_chunk_id, min(fwd_chunk_id + ahead, len(self.args_recv_info))):
            self._post_forward(chunk)
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs the module once its activations are there."""
        self.begun = True
        self._wait(self._receives.pop((False, fwd_chunk_id), []))
        with self._failing(f"micro-batch {fwd_chunk_id}: forward"):
            self._context.form(
                fwd_chunk_id, *args[:2], **{name: kwargs[name] for name in ("args", "kwargs") if name in kwargs}
            )
            self.in_micro_batch = True
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            finally:
                self.in_micro_batch = False

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends activations, and posts the receive of the gradient that will answer them; torch is given none."""
        codec, samples = self._activation(fwd_chunk_id)
        for position, op in enumerate(super().get_fwd_send_ops(fwd_chunk_id)):
            self._send(self.stage_index, op, Place(False, position, fwd_chunk_id), codec, samples)
        side = self._boundary(self.stage_index)
        if side is not None and not self.is_last and self._context.names:
            with self._failing():
                self._sends.setdefault((False, fwd_chunk_id), []).append(self._context.send(side, fwd_chunk_id))
        self._post_backward(fwd_chunk_id)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Posts the receive of a gradient where it was not posted before; torch is given none."""
        self._post_backward(bwd_chunk_id)
        return []

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's backward once its gradient is there."""
        # No gradient answers an activation that was refused: that is told now, not at the deadline.
        self._wait(self._sends.pop((False, bwd_chunk_id), []))
        self._wait(self._receives.pop((True, bwd_chunk_id), []))
        with self._failing(f"micro-batch {bwd_chunk_id}: backward"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends gradients; torch is given none."""
        for position, op in enumerate(super().get_bwd_send_ops(bwd_chunk_id)):
            self._send(self.stage_index - 1, op, Place(True, position, bwd_chunk_id), self._backward, None)
        return []

    def _send(self, number: int, op: dist.P2POp, place: Place, codec: str, samples: list[int] | None) -> None:
        """Sends a tensor across boundary `number`, and keeps the message until somebody waits for it."""
        side = self._boundary(number)
        assert side is not None  # torch gives no op where both stages are on this rank
        with self._failing(), named(f"stage {self.stage_index}", side.name_of(place)):
            if self._finite and not codec and not place.gradients and not torch.isfinite(op.tensor).all():
                raise ValueError("expected finite activations, got NaN or infinity")
            message = side.send(op.tensor, place, codec, samples)
        if message.spoilt:  # told now
            self._wait([message])
        self._sends.setdefault((place.gradients, place.chunk), []).append(message)

    def _post_forward(self, chunk: int) -> None:
        """Posts the receives of a micro-batch's activations, once."""
        if (False, chunk) in self._posted:
            return
        codec, samples = self._activation(chunk)
        self._post(self.stage_index - 1, super().get_fwd_recv_ops(chunk), False, chunk, codec, samples)
        side = None if self.is_first else self._boundary(self.stage_index - 1)
        if side is not None and self._context.names:
            with self._failing():
                self._receives.setdefault((False, chunk), []).append(self._context.recv(side, chunk))

    def _post_backward(self, chunk: int) -> None:
        """Posts the receives of a micro-batch's gradients, once."""
        if self.has_backward and (True, chunk) not in self._posted:
            self._post(self.stage_index, super().get_bwd_recv_ops(chunk), True, chunk, self._backward, None)

    def _post(
        self, number: int, ops: list[dist.P2POp], gradients: bool, chunk: int, codec: str, samples: list[int] | None
    ) -> None:
        """Posts the receives of one micro-batch across boundary `number`."""
        self._posted.add((gradients, chunk))
        for position, op in enumerate(ops):
            side = self._boundary(number)
            assert side is not None
            place = Place(gradients, position, chunk)
            with self._failing(), named(f"stage {self.stage_index}", side.name_of(place)):
                receive = side.recv(op.tensor, place, codec, samples)
            self._receives.setdefault((gradients, chunk), []).append(receive)

    def _wait(self, messages: Sequence[Message]) -> None:
        with self._failing():
            for message in messages:
                wait_for(message, f"stage {self.stage_index}")

    @contextlib.contextmanager
    def _failing(self, doing: str = "") -> Iterator[None]:
        """The stage fails where this does; `doing`, where it is given, and the module's error are the cause."""
        try:
            yield
        except Exception as error:
            cause = error.__cause__ or error  # torch's error has all tensors of the stage in its text
            self.fail(f"stage {self.stage_index}: {doing}: {type(cause).__name__}: {cause}" if doing else str(error))
            raise

    def _activation(self, chunk: int) -> tuple[str, list[int] | None]:
        """The codec of a micro-batch's activations, and its samples where they are remembered."""
        if not self.has_backward:
            return self._evaluate, None
        if self._cache is None:
            return self._forward, None
        if self._samples is None:
            raise ValueError("a step with a cache: expected samples= by lc.pipeline.step(), got none")
        return self._forward, self._samples[chunk]

    def _boundary(self, number: int) -> Boundary | None:
        """This rank's side of the boundary behind stage `number`; None at an end, and where both stages are on this rank."""
        if number not in self._boundaries:
            other = number + 1 if number == self.stage_index else number
            peer = self.stage_index_to_group_rank.get(other, self.group_rank)
            self._boundaries[number] = (
                None
                if peer == self.group_rank
                else Boundary(self._backend, peer, number, first=self._first, cache=self._cache, unit=self._unit)
            )
        return self._boundaries[number]
