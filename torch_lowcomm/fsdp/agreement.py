"""Compares layouts between ranks over all groups that a model's modules use, before any rank has changed anything.

Among these are the groups of replicas (HSDP), whose all_reduce FSDP2 issues and their policy codes.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.codec import codec as checked_codec
from torch_lowcomm.fsdp._torch_2_11 import ParameterGroup
from torch_lowcomm.groups import backend_of, set_policy

Named = tuple[str, _C.Layout]


def agree(asked: Mapping[str, Sequence[Named]]) -> None:
    """Compares layouts with the other ranks of every group. Collective.

    The error of the first group that differs, or of which a rank raised, is raised on all its ranks.

    1. Every group compares its layouts. If one group differs, the others compare all the same: their ranks would wait.
    2. Groups that agreed learn in a second round of the others' differences. Groups share ranks, and so no rank goes on alone.

    `asked` has layouts by a group's name, in the same order on all ranks. Groups that are not lowcomm's are skipped.
    """
    first: Exception | None = None
    agreed = []
    for name, layouts in asked.items():
        backend = _C.find_backend(name)
        if backend is None:
            continue
        try:
            backend.agree_layouts(layouts)
            agreed.append(backend)
        except Exception as error:
            first = first or error
    for backend in agreed:  # on every rank of a group or on none: a difference raises on all of them
        try:
            backend.agree_layouts([], error=_said(first))
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def tell(names: Iterable[str], error: Exception) -> None:
    """Tells an error of this rank to its peers, which wait to agree and raise it too."""
    for name in names:
        backend = _C.find_backend(name)
        if backend is not None:
            backend.agree_layouts([], error=_said(error))


def _said(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


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
