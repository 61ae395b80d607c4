"""What a quantized FSDP2 model adds to a checkpoint: how far its random draws have come."""

from __future__ import annotations

from typing import Any

from torch_lowcomm.fsdp.comms import QuantizedAllGather, QuantizedReduceScatter
from torch_lowcomm.fsdp.hosts import HostComms


class QuantizedComms:
    """Handle of a model's quantized comms; a `torch.distributed.checkpoint` Stateful.

    Stochastic codecs draw by the number of the step and of the reduction. A run that resumes with these counters draws
    what the uninterrupted run would have: save the handle beside model and optimizer and load it with them, in any
    order, before the next forward pass.

    Attributes:
        hosts: With `quantize(hosts=…)` the two levels: `lc.stats(handle.hosts.between)` is what this rank put on the slow
            link. Else None.
    """

    def __init__(
        self,
        gathers: list[QuantizedAllGather],
        reductions: list[QuantizedReduceScatter],
        hosts: HostComms | None = None,
    ) -> None:
        self.hosts = hosts
        self._gathers = gathers
        self._reductions = reductions

    def state_dict(self) -> dict[str, Any]:
        """{"weights.<group>": version of its weights, "gradients.<group>": reductions so far}, as integers."""
        state = {f"weights.{i}": gather.weights.version() for i, gather in enumerate(self._gathers)}
        return state | {f"gradients.{i}": reduction.calls for i, reduction in enumerate(self._reductions)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counters.

        Raises:
            ValueError: The state is that of a model with other groups.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(
                f"fsdp: expected the counters of {len(self._gathers)} wrapped modules, got {sorted(state)}"
            )
        for i, gather in enumerate(self._gathers):
            gather.weights.set_version(int(state[f"weights.{i}"]))
        for i, reduction in enumerate(self._reductions):
            reduction.calls = int(state[f"gradients.{i}"])
