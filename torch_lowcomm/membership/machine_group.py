"""A group of machines, and how a process connects to it."""

import dataclasses
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistBackendError, PrefixStore, Store

from torch_lowcomm import _C
from torch_lowcomm._create import make_nccl
from torch_lowcomm.membership.site import Site


@dataclasses.dataclass(frozen=True)
class MachineGroup:
    """A group of machines or sites."""

    number: int  # counted at the store; each group has separate keys
    machines: tuple[str, ...]  # ids, by rank
    rank: int  # of this machine or site
    backends: tuple[_C.LowcommBackend, ...]  # by stripe of this process; no c10d groups

    def abort(self) -> None:
        """Ends the group at once; ops under way raise."""
        for backend in self.backends:
            backend.abort()

    def shutdown(self) -> None:
        """Ends the group after its ops."""
        for backend in self.backends:
            backend.shutdown()


class Connector:
    """Connects one process of a machine to the groups that its machine is in. The store is that of all machines, under the
    prefix of groups; `options` and the progress deadline `timeout` are the groups'.
    """

    def __init__(self, store: Store, machine_id: str, site: Site, options: _C.Options, timeout: timedelta) -> None:
        self._groups, self._id, self._site, self._options, self._timeout = store, machine_id, site, options, timeout

    def connect(self, number: int, machines: Sequence[str], stripes: Sequence[int]) -> MachineGroup:
        """Connects this process's stripes, or none where a rank of the site cannot; a machine or a rank that did not come, or
        failed, is a DistBackendError.
        """
        rank = list(machines).index(self._id)
        backends: list[_C.LowcommBackend] = []
        failed = None
        try:
            for stripe in stripes:
                backends.append(
                    _C.create_backend(
                        PrefixStore(f"{number}/{stripe}", self._groups),
                        rank,
                        len(machines),
                        self._options,
                        self._timeout,
                        f"lowcomm-members-{number}-{stripe}",
                        list(range(len(machines))),
                        make_nccl,
                    )
                )
        except Exception as error:  # whatever it is, the other ranks wait for this one's word
            failed = error
        try:
            self._site.agree(failed)
        except DistBackendError:
            for backend in backends:
                backend.abort()
            raise
        return MachineGroup(number, tuple(machines), rank, tuple(backends))
