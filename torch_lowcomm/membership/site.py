"""The processes of one site: the first talks to the store, and the others hear from it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm._all_gather_json import all_gather_json

T = TypeVar("T")

# Errors of the first rank that the others raise too, by name.
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, TimeoutError, ConnectionError, dist.DistBackendError)
}


class Site:
    """The ranks of a site, in a group of their own that nothing else uses; None for a site of one process. All methods are
    collective. They raise DistBackendError where a rank of the site was lost, or has sent nothing for `timeout`, which is
    longer than the leader's waits. The leader's `rank` is 0.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self.rank, self.size, self._group = 0, 1, None
        if group is None:
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.size > 1:
            self._group = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timeout,
                backend="lowcomm",
                pg_options=_C.Options(""),
                use_local_synchronization=True,
                group_desc="lowcomm_site",
            )

    @property
    def leads(self) -> bool:
        """Whether this process talks to the store."""
        return self.rank == 0

    def all_gather(self, mine: Any) -> list[Any]:
        """Returns every rank's value, by rank, as JSON returns them."""
        return [mine] if self._group is None else all_gather_json(mine, self._group)

    def told(self, call: Callable[[], T]) -> T:
        """Calls on the leader and returns its result on every rank, as JSON returns it; or raises what the call raised, on the
        other ranks as a kind in `ERRORS`, else RuntimeError.
        """
        if self._group is None:
            return call()
        value, error, raised = None, "", None
        if self.leads:
            try:
                value = call()
            except Exception as caught:
                error, raised = f"{type(caught).__name__}: {caught}", caught
        value, error = self.all_gather((value, error))[0]
        if raised is not None:
            raise raised
        if error:
            kind, _, text = error.partition(": ")
            raise ERRORS.get(kind, RuntimeError)(f"the first rank of the site: {text}")
        return value

    def agree(self, error: Exception | None) -> None:
        """Raises on all ranks if one has an error: its own on that rank, DistBackendError on the others."""
        errors = self.all_gather("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text:
                raise dist.DistBackendError(f"membership: expected no error in this site, got rank {rank}'s: {text}")
