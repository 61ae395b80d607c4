"""FSDP1 (`FullyShardedDataParallel`): its comm hook codes gradients, the policy of its group codes weights."""

from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm._copies import NotCopied
from torch_lowcomm._log import logger
from torch_lowcomm.codec import CODED, codec
from torch_lowcomm.groups import backend_of, exact
from torch_lowcomm.reduction import all_reduce


class State(NotCopied):
    """The state of `hook` for an FSDP1 model: codec, group, and the count of its random draws.

        model = FullyShardedDataParallel(module, process_group=group)
        lc.set_policy(group, "all_gather=minmax8:bucket=1024")                              # weights
        model.register_comm_hook(lc.fsdp.fsdp1.State(gradients="qsgd8:bucket=1024", group=group), lc.fsdp.fsdp1.hook)

    FSDP1 passes flat buffers without the parameters in them, so that norms and biases are coded too: prefer FSDP2 and
    `lc.fsdp.quantize`. Give weights a codec that does not round at random (not qsgd or lattice): a policy draws again for
    the gather of the backward pass. torch allows no comm hook with HYBRID_SHARD. There use a policy on each of the two
    groups: "all_gather=…; reduce_scatter=…" on the one that shards, "all_reduce=…" on the one that replicates.

    With NO_SHARD gradients go through `lc.all_reduce`, whose draws depend on the number of the group's op: a resumed run then
    does not have the bits of the unbroken run. `lc.ddp.hook` on DDP is the same training, and has them.

    Args:
        gradients: Codec of the reduce-scatters, or of NO_SHARD's all_reduces; "none" for exact.
        group: The model's process group, of backend lowcomm; None for the default group.
    """

    def __init__(self, *, gradients: str = "qsgd8:bucket=1024", group: dist.ProcessGroup | None = None) -> None:
        self.codec = codec(gradients).spec
        self.group = group if group is not None else dist.group.WORLD
        self.calls = 0
        self._backend = backend_of(group)
        self._slot = self._backend.reserve_slots(self._backend.size())  # every slice has separate draws
        logger.info(
            "fsdp1.State: gradients of FSDP1's flat buffers travel as %s, norms and biases too; weights by the policy of "
            "group %s, %r",
            self.codec,
            self._backend.group_name,
            self._backend.policy,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns {"calls": reductions so far}. With it a resumed run has the unbroken run's draws (except NO_SHARD)."""
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        self.calls = int(state["calls"])

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.calls += 1
        layout = _C.Layout([(0, output.numel(), self.codec)])
        self._backend.reduce_scatter_layout(
            output, input, layout, dist.ReduceOp(dist.ReduceOp.AVG), slot=self._slot, step=self.calls % 2**32
        ).wait()


def hook(state: State, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Averages a flat gradient over the group, for `FullyShardedDataParallel.register_comm_hook`.

    Each slice is encoded for its owner, which decodes and averages in rank order in float32; its own part is not coded. An
    element that the codec refuses (a NaN) is a ValueError on the rank that has it, on others a DistBackendError.

    Args:
        state: The state of this model.
        gradient: The whole gradient, [W·n]; averaged in place if there is no output (NO_SHARD).
        output: This rank's slice, [n].
    """
    why = f"its dtype is {gradient.dtype}" if gradient.dtype not in CODED else None
    why = "inside lc.exact()" if _C.in_exact() else why
    if why is not None:
        state._backend.note_exact("all_reduce" if output is None else "reduce_scatter", why)
    if output is None and (why is not None or state.codec == "none"):
        with exact():
            dist.all_reduce(gradient, dist.ReduceOp.AVG, group=state.group)
    elif output is None:
        all_reduce(gradient, dist.ReduceOp.AVG, state.group, codec=state.codec)
    elif why is not None:
        with exact():
            dist.reduce_scatter_tensor(output, gradient, dist.ReduceOp.AVG, group=state.group)
    else:
        state._reduce_scatter(output, gradient)
