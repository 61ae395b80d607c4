"""The part of a quantized FSDP2 model's checkpoint that FSDP2 does not have: counts of random draws, learned levels."""

from typing import Any

from torch_lowcomm._copies import NotCopied
from torch_lowcomm.fsdp.comms import QuantizedAllGather, QuantizedReduceScatter
from torch_lowcomm.fsdp.hosts import HostComms


class QuantizedComms(NotCopied):
    """Handle of a model's quantized communication; a `torch.distributed.checkpoint` Stateful.

    Stochastic codecs draw by the numbers of the step and of the reduction. A run that resumes with these counters has the same
    draws as the uninterrupted run. Save the handle with model and optimizer and load all three, in any order, before the next
    forward pass. Learned levels are saved with it, by the parameters' names, and may be loaded on another number of ranks.

    Attributes:
        hosts: With `quantize(hosts=…)` the groups of both levels: `lc.stats(handle.hosts.between)` has what this rank put
            on the slow link. Else None.
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
        """Returns the state for a checkpoint, with keys by the number <g> of a wrapped module.

        Returns:
            {"weights.<g>": version of the module's weights, "gradients.<g>": reductions so far}, as integers. With levels
            codecs also their tables, "weights.<g>.levels" and "gradients.<g>.levels". With a quantized master also
            "master.<g>": whether the shard is the decoded value of that version.
        """
        state: dict[str, Any] = {}
        for i, (gather, reduction) in enumerate(zip(self._gathers, self._reductions, strict=True)):
            state[f"weights.{i}"] = gather.weights.version()
            state[f"gradients.{i}"] = reduction.calls
            if gather.master:
                state[f"master.{i}"] = gather.master.holds_decoded(gather.weights.version())
        return state | {key: levels.state_dict() for key, levels in self._levels()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets counters and levels.

        Raises:
            ValueError: The state is of a model with other wrapped modules, codecs or master. Nothing has changed.
        """
        expected = set(self.state_dict())
        if set(state) != expected:
            raise ValueError(
                f"fsdp: expected the counters of {len(self._gathers)} wrapped modules, got {sorted(state)} "
                f"(missing: {sorted(expected - set(state))}, unexpected: {sorted(set(state) - expected)})"
            )
        for key, levels in self._levels():
            levels.check(state[key])
        for key, levels in self._levels():
            levels.load_state_dict(state[key])
        for i, (gather, reduction) in enumerate(zip(self._gathers, self._reductions, strict=True)):
            version = int(state[f"weights.{i}"])
            gather.weights.set_version(version)
            reduction.calls = int(state[f"gradients.{i}"])
            if gather.master:
                gather.master.load(version if state[f"master.{i}"] else None)

    def _levels(self) -> list[tuple[str, Any]]:
        named = [(f"weights.{i}.levels", gather.levels) for i, gather in enumerate(self._gathers)]
        named += [(f"gradients.{i}.levels", reduction.levels) for i, reduction in enumerate(self._reductions)]
        return [(key, levels) for key, levels in named if levels.learns]
