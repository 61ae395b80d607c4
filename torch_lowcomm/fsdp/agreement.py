"""Ranks find what differs between them before any has changed anything, over all groups that a model's modules use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch_lowcomm import _C

Named = tuple[str, _C.Layout]


def agree(asked: Mapping[str, Sequence[Named]]) -> None:
    """Compare layouts with the other ranks of every group. Collective.

    No group is left out when one differs, for the ranks of the others would wait; and since groups share ranks, those that
    agreed hear in a second round what the others found, so that nobody goes on alone.

    Args:
        asked: By a group's name, in one order on all ranks; groups that are not lowcomm's are passed over.

    Raises:
        DistBackendError: The first group's in which something differs or a rank raised.
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
    """A mistake of this rank's: its peers wait to agree, and get it as theirs."""
    for name in names:
        backend = _C.find_backend(name)
        if backend is not None:
            backend.agree_layouts([], error=_said(error))


def _said(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"
