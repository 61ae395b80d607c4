"""HSDP: FSDP2 itself issues the all_reduce between replicas; the policy of their groups codes it."""

from collections.abc import Iterable

import torch.distributed as dist

from torch_lowcomm._log import logger
from torch_lowcomm.codec import codec as checked_codec
from torch_lowcomm.fsdp._torch_2_11 import ParameterGroup
from torch_lowcomm.groups import backend_of, set_policy


class Replicas:
    """The groups over which wrapped modules sum the gradients of their replicas; a codec of None leaves their policies alone."""

    def __init__(self, groups: Iterable[ParameterGroup], codec: str | None) -> None:
        found = [g.replicas for g in groups if g.replicas is not None]
        self._groups: dict[str, dist.ProcessGroup] = {group.group_name: group for group in found}
        self._codec = checked_codec(codec).spec if codec is not None else None
        if self._codec is None:
            return
        if not self._groups:
            raise ValueError(
                f"fsdp.quantize: expected replicate=None for a model without replicas (a mesh of one dimension), got {codec!r}"
            )
        for group in self._groups.values():
            backend_of(group)

    @property
    def names(self) -> list[str]:
        """Names of the groups, lowcomm's or not."""
        return list(self._groups)

    @property
    def said(self) -> str:
        """The text that ranks compare; it must not have a '='."""
        return f"replicas {self._codec or 'by their policy'}".replace("=", " ")

    def install(self) -> None:
        """Puts the codec into the groups' policies, which keep their entries for other ops. Collective."""
        if self._codec is None:
            return
        for group in self._groups.values():
            entries = dict(entry.split("=", 1) for entry in backend_of(group).policy.split("; ") if entry)
            entries.pop("all_reduce", None)
            if self._codec != "none":
                entries["all_reduce"] = self._codec
            set_policy(group, "; ".join(f"{op}={codec}" for op, codec in entries.items()))
            logger.info(
                "fsdp.quantize: gradients between replicas (group %s) travel as %s in flat buffers, norms and biases too, "
                "where a rank has min_bytes = %d of them",
                group.group_name,
                self._codec,
                backend_of(group).min_bytes,
            )
