"""A stage of torch's pipelining that sends and receives its own messages.

It overrides what torch's schedules call, and asks torch's own methods for the tensors, in ops that it does not pass on.
tests/torch_names.py lists the names of torch's that it overrides or uses.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from torch_lowcomm import _C
from torch_lowcomm._copies import NotCopied
from torch_lowcomm.pipeline.boundary import BOUNDARIES
from torch_lowcomm.pipeline.boundary_module import boundary_module
from torch_lowcomm.pipeline.cache import Cache, expect_cache
from torch_lowcomm.pipeline.stage_messages import StageCodecs, StageMessages
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
        first_visit: str | None = "minmax8:bucket=128",
        evaluate: str | None = None,
        cache: Cache | None = None,
        window: int | None = None,
        unit: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Makes a stage; all stages of a pipeline are given the same options.

        Args:
            submodule: The module of this stage. One that implements `lc.pipeline.BoundaryModule` decides how its messages travel.
            stage_index: Its place in the pipeline, from 0.
            num_stages: Stages of the pipeline, 257 at most.
            device: Where the module computes.
            *args: As PipelineStage.
            forward: The codec of activations; of their changes where there is a cache. None: exact, as for the other codecs.
            backward: The codec of gradients.
            first_visit: With a cache, the codec of a sample's first visit; in the paper it is exact.
            evaluate: The codec of activations in a schedule's eval(). It never uses the cache.
            cache: What is remembered of each sample; `lc.pipeline.step` then needs the samples' numbers.
            window: How many micro-batches' receives are posted ahead, 1 or more. None: all of a step.
            unit: What codecs code without regard to the rest of a message, so that no decoded element tells of the rest: "token",
                the last dimension; "sample", all but the first one; "message", nothing. None: a token of a tensor with three
                dimensions, [batch, time, width], else a sample. Tensors of one dimension travel exact, unless "message".
            **kwargs: As PipelineStage.

        Raises:
            TypeError: The module has a part of `BoundaryModule`, or the cache is none.
            ValueError: An option is none of these, the group is of another backend, or a cache has no forward codec.
        """
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        self._module = boundary_module(submodule)
        forward, backward = (self._module.message_codec if codec is None else codec for codec in (forward, backward))
        expect_cache(cache, forward)
        if num_stages > BOUNDARIES + 1:
            raise ValueError(f"num_stages: expected at most {BOUNDARIES + 1}, got {num_stages}")
        if window is not None and window < 1:
            raise ValueError(f"window: expected 1 or more, got {window}")
        for codec in (forward, backward, first_visit, evaluate):
            if codec is not None:
                _C.Codec(codec)
        expect_unit(unit)
        self._cache, self._window, self._unit = cache, window, unit
        chosen = StageCodecs(forward or "", backward or "", first_visit or "", evaluate or "", cache, unit)
        self.messages = StageMessages(self, self._module, chosen)
        # torch does not compare them where both are given.
        given = dict(zip(("input_args", "output_args"), args, strict=False)) | kwargs
        self._inputs, self._outputs = given.get("input_args"), given.get("output_args")
        self._micro_batches: int | None = None
        self.begun = False  # torch's stages have exchanged their shapes

    @property
    def cache(self) -> Cache | None:
        """The memory of this stage's samples; None without one."""
        return self._cache

    def options_to_compare(self, *, sends: bool) -> dict[str, str]:
        """Options that must equal those of the stage behind this one, or with `sends` false before it: the number of stages,
        the unit, where torch was given them the tensors of a micro-batch that cross the boundary, and the module's
        `message_options`.
        """
        tensors = self._outputs if sends else self._inputs
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ())
        shapes = ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
        options = {"stages": str(self.num_stages), "unit": str(self._unit)} | dict(self._module.message_options)
        return options | ({"tensors": shapes} if shapes else {})

    def resume(self) -> None:
        """Takes steps again, once the stages next to this one have failed too; `lc.pipeline.reset` calls this."""
        self.messages.resume()
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
        self.messages.failure = ""

    def expect_micro_batches(self, count: int) -> None:
        """Refuses a schedule of another number of micro-batches than before: torch keeps the buffers of the first one's."""
        if self._micro_batches not in (None, count):
            raise ValueError(
                f"stage {self.stage_index}: expected a schedule of {self._micro_batches} micro-batches, as before, got {count}"
            )
        self._micro_batches = count

    def finish(self) -> None:
        """Waits until all that the step has sent has arrived.

        Raises:
            ValueError: An activation or gradient could not be encoded.
            torch.distributed.DistBackendError: A peer or the network failed, or the two sides mean different messages.
        """
        self.messages.finish()

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        """Sends another stage the shapes of what crosses their boundary; torch calls this in the first step. By a channel, on
        which a stage that fails meanwhile is noticed: torch's own messages would wait for it.
        """
        with self.messages.failing():
            self.messages.boundary_to(dst_stage).send_shapes(meta)

    def _recv_meta(self, src_stage: int) -> Any:
        """Receives the shapes that another stage sends."""
        with self.messages.failing():
            return self.messages.boundary_to(src_stage).recv_shapes()

    def clear_runtime_states(self) -> None:
        """Begins a step, unless an earlier one failed, here or at a stage next to this one; torch's schedules call this."""
        self.messages.expect_none_failed()
        self.finish()
        super().clear_runtime_states()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Posts the receives of activations; torch is given none."""
        self.begun = True
        ahead = len(self.args_recv_info) if self._window is None else self._window
        for chunk in range(fwd_chunk_id, min(fwd_chunk_id + ahead, len(self.args_recv_info))):
            self.messages.post(False, chunk, super().get_fwd_recv_ops)
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs the module once its activations are there."""
        self.begun = True
        self.messages.wait(False, fwd_chunk_id)
        with self.messages.failing(f"micro-batch {fwd_chunk_id}: forward"):
            given = dict(zip(("args", "kwargs"), args, strict=False)) | kwargs
            self.messages.compare_context(fwd_chunk_id, given.get("args") or (), given.get("kwargs") or {})
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends activations, and posts the receive of the gradient that will answer them; torch is given none."""
        self.messages.send(False, fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))
        self.messages.post(True, fwd_chunk_id, super().get_bwd_recv_ops)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Posts the receive of a gradient where it was not posted before; torch is given none."""
        self.messages.post(True, bwd_chunk_id, super().get_bwd_recv_ops)
        return []

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's backward once its gradient is there."""
        self.messages.wait(True, bwd_chunk_id)
        with self.messages.failing(f"micro-batch {bwd_chunk_id}: backward"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends gradients; torch is given none."""
        self.messages.send(True, bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))
        return []
