"""lowcomm for torchft: the process group between the replica groups of its Manager.

Import it by name, because torchft is a package of its own: `pip install torchft-nightly`.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import torch
from torch.distributed import DistBackendError, Store, Work
from torch.distributed import ProcessGroup as BaseProcessGroup
from torchft.process_group import ProcessGroupWrapper

from torch_lowcomm import _C
from torch_lowcomm._create import create_backend, without_nccl

_made = itertools.count()
_CUSTOM = BaseProcessGroup.BackendType.CUSTOM


class ProcessGroupLowcomm(ProcessGroupWrapper):
    """A process group that torchft's Manager makes anew, of other replica groups, whenever one comes or goes.

        policy = "all_reduce=qsgd4:bucket=64"
        manager = Manager(pg=ProcessGroupLowcomm(lc.Options(policy, min_bytes=0)), use_async_quorum=False, …)

    Every all_reduce of the Manager goes over it, those of torchft's DiLoCo and LocalSGD among them, and is coded as the policy
    says. All replica groups give the same options. A new group has new connections; the group before it is aborted, and its
    ops that are under way raise. After an op has failed, `errored()` returns the reason until the Manager makes the next group.

    Args:
        options: Options of the groups; None takes them from the environment, or from the default group if it is one of
            lowcomm.
        timeout: Progress deadline of the groups, unless the options have one, and of the store's answers.

    Raises:
        TypeError: `options` is neither an `Options` nor None.
    """

    def __init__(self, options: _C.Options | None = None, *, timeout: timedelta = timedelta(seconds=60)) -> None:
        if options is not None and not isinstance(options, _C.Options):
            raise TypeError(f"options: expected torch_lowcomm.Options or None, got {type(options).__name__}")
        super().__init__(timeout)
        self._options = without_nccl(options)
        self._backend: _C.LowcommBackend | None = None
        self._error: Exception | None = None

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        self._error = None
        self._backend = create_backend(
            SimpleNamespace(
                store=store,
                group_rank=rank,
                group_size=world_size,
                timeout=self._timeout,
                group_id=f"torchft-{next(_made)}",
                global_ranks_in_group=range(world_size),
            ),
            self._options,
        )
        group = BaseProcessGroup(store, rank, world_size)
        group._set_default_backend(_CUSTOM)
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), _CUSTOM, self._backend)
        return group

    def _wrap_work(self, work: Work, opts: object) -> Work:
        """Keeps the error of an op for `errored()`; torchft calls it with every op."""
        backend = self._backend

        def note(future: torch.futures.Future[object]) -> None:
            try:
                future.value()
            except Exception as error:
                if self._backend is backend:  # not an op of the group before
                    self._keep(error)

        work.get_future().add_done_callback(note)
        return work

    @contextmanager
    def _run_context(self) -> Iterator[None]:
        """Keeps the error of a group that takes no more ops; torchft issues every op inside."""
        try:
            yield
        except DistBackendError as error:
            self._keep(error)
            raise

    def _keep(self, error: Exception) -> None:
        if self._error is None:
            self._error = error

    def errored(self) -> Exception | None:
        """Returns the first error of the group's ops, soon after the op has raised it; None while there is none."""
        return self._error

    def abort(self, errored: bool = True) -> None:
        """Gives the group up: ops under way raise, and peers hear of it. `errored`: torchft logs it as an error."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()
        self._pg = None
        super().abort(errored)

    def shutdown(self) -> None:
        """Ends the group after its ops."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.shutdown()
        super().shutdown()

    def getBackendName(self) -> str:
        """Returns the name that torchft shows."""
        return "torchft-lowcomm"
