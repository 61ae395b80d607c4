"""Packs an outer loop's state for a checkpoint: what ranks share, what belongs to one rank, and what varies in shape."""

from collections.abc import Mapping
from typing import Any

import torch

from torch_lowcomm import _C
from torch_lowcomm._checksum import checksum, expect_checksum
from torch_lowcomm._saved import packed, unpacked
from torch_lowcomm.diloco.groups import LoopGroups
from torch_lowcomm.diloco.inner_optimizer import OptimizerAround
from torch_lowcomm.membership import Membership


class LoopState:
    """The state of a loop and its inner optimizer, as one checkpoint entry.

    It has the form of an optimizer's state, {"state": {}, "param_groups": [{"params": [], shared: …, own: …}]}, for `torch.save`
    or torch.distributed.checkpoint. torch.distributed.checkpoint.state_dict replaces numbers of parameters by names in "state"
    and "params" and leaves the rest as it is; both are empty here. In "state" the inner optimizer's moments would have the same
    names on all ranks, and a checkpoint would keep those of one rank only. `by_clock`: the ranks of a group count inner steps of
    their own, as with `sync_seconds`.
    """

    def __init__(self, outer: _C.DiLoCoX, groups: LoopGroups, *, by_clock: bool) -> None:
        self._outer, self._shared, self._own, self._by_clock = outer, groups.shared, groups.own, by_clock

    def packed(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the state with an inner optimizer's. Collective, also where this rank's raises."""
        try:
            inner = packed(optimizer.state_dict())
        except Exception as error:
            self._outer.state_failed(f"{type(error).__name__}: {error}")
            raise
        equal: dict[str, Any] = {}
        kept: dict[str, Any] = {}
        varying: dict[str, Any] = {}
        state = self._outer.state()
        for name, tensor in state.items():
            # Inner steps: the run's, or those to a fragment's next message.
            counts = name == "steps" or (name.startswith("fragment") and name.removeprefix("fragment").isdigit())
            if name.startswith("own."):
                kept[name.removeprefix("own.")] = tensor
            # Shapes that change between outer steps; distributed checkpoints need fixed ones.
            elif name == "effective_ranks" or name.endswith(".factor") or (self._by_clock and counts):
                varying[name] = tensor
            else:
                equal[name] = tensor
        steps = {"outer_steps": int(state["outer_steps"]), "steps": int(state["steps"])}
        content = packed({"outer": varying, **steps, "shared_crc": checksum(equal)})
        mine: dict[str, Any] = {"outer": kept, "packed": content, "inner": inner}
        parts = {self._shared: equal, self._own: {**mine, "crc": checksum(mine)}}
        return {"state": {}, "param_groups": [{"params": [], **parts}]}

    def load(self, around: OptimizerAround, state_dict: Mapping[str, Any]) -> None:
        """Loads what `packed` returned into the loop and the inner optimizer of `around`; where it raises, into none of them."""
        outer, inner = self._unpacked(state_dict)
        before = around.inner.state_dict()
        around.load_inner(inner)
        try:
            self._outer.load(outer)
        except Exception:
            around.load_inner(before)
            raise

    def resume(self, around: OptimizerAround, state_dict: dict[str, Any] | None, members: Membership) -> None:
        """Loads a state, or none, and compares how that went on the ranks of the site, which meet the other sites together.
        Different steps are a ValueError; another rank that could not load its state is a DistBackendError.
        """
        error = None
        try:
            if state_dict is not None:
                self.load(around, state_dict)
        except Exception as caught:  # whatever it is, the other ranks wait for this one's word
            error = caught
        values = members.site_values([self._outer.steps, int(self._outer.report["outer_steps"])], error)
        for unit, steps in zip(("inner", "outer"), map(list, zip(*values, strict=True)), strict=True):
            if len(set(steps)) > 1:
                raise ValueError(
                    f"DiLoCoX: resume: expected states of one {unit} step on all ranks of the site, got {steps} by rank (0: none)"
                )

    def _unpacked(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Returns (the tensors that `_C.DiLoCoX.load` takes, the inner optimizer's state_dict)."""
        groups = state_dict.get("param_groups") or [{}]
        parts = {key: value for key, value in groups[0].items() if key != "params"}
        for key in (self._shared, self._own):
            if key not in parts:
                raise ValueError(
                    f"DiLoCoX: load_state_dict: expected {key!r}, got {sorted(parts)}: each rank loads its own"
                )
        shared, own = parts[self._shared], parts[self._own]
        mine = {key: value for key, value in own.items() if key != "crc"}
        expect_checksum("DiLoCoX", mine, own.get("crc"))
        content = unpacked(mine["packed"])
        unit = "steps" if "steps" in shared else "outer_steps"
        shared_steps = shared.get(unit)
        # As where rank 0's state is broadcast to ranks that have none.
        if isinstance(shared_steps, torch.Tensor) and content[unit] != int(shared_steps):
            raise ValueError(
                f"DiLoCoX: load_state_dict: expected {self._own!r} of {'inner' if unit == 'steps' else 'outer'} step "
                f"{int(shared_steps)}, as {self._shared!r}, got one of {content[unit]}: each rank loads its own"
            )
        expect_checksum("DiLoCoX", shared, content["shared_crc"])
        kept = {f"own.{name}": tensor for name, tensor in mine["outer"].items()}
        return {**shared, **content["outer"], **kept}, unpacked(mine["inner"])
