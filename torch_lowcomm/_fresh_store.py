"""A part of a store that no earlier group has used.

torchrun starts its workers again with the store that the dead ones had: its rendezvous keeps one TCPStore, and
`_create_c10d_store` (torch 2.13), which takes the store for a new one, puts no prefix in front of an attempt. The addresses of
the dead stand in it, and a group that reads them connects to nobody.

Other launchers (srun, mpirun, mp.spawn) give MASTER_ADDR and MASTER_PORT, where rank 0 serves the store. A rank that destroys its
group and makes the next one before rank 0 does meets the store of the group before, which ends with that group: an error says so.
"""

import hashlib
import json
import os
import time
from datetime import timedelta

from torch.distributed import DistBackendError, DistNetworkError, PrefixStore, Store, TCPStore, is_torchelastic_launched

_PAUSE_S = 0.005


def fresh_store(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Returns a prefix of a TCPStore, or of any store under torchrun, for this group alone; other stores as they are.

    Every rank draws a number, and writes down which numbers it has seen. Once all ranks have written down the same ones, none
    of them is of a dead process, which cannot have seen this rank's. Collective over the group; three answers of the store
    at least. A rank that does not show up within `timeout`, or a store that is lost, is a DistBackendError. The handshake
    that follows has a deadline of its own, so that making a group may take both.
    """
    served = _served(store)
    if size == 1 or (served is None and not is_torchelastic_launched()):
        return store
    try:
        return _fresh(store, rank, size, timeout)
    except DistNetworkError as error:
        raise DistBackendError(
            f"lowcomm: expected the store to serve while the group is made, lost it on rank {rank} of {size}: {error}. If these "
            "processes made a group by the same MASTER_ADDR and MASTER_PORT before, this rank met its store, which ended with "
            "rank 0's part of that group: give every group a MASTER_PORT of its own, or start the ranks by torchrun"
        ) from error


def _fresh(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    keys = [f"seen/{peer}" for peer in range(size)]
    seen = [""] * size
    seen[rank] = os.urandom(8).hex()
    mine = json.dumps(seen)
    store.set(keys[rank], mine)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        here = range(size) if store.check(keys) else [peer for peer in range(size) if store.check([keys[peer]])]
        theirs = dict(zip(here, _read(store, [keys[peer] for peer in here]), strict=True))
        if len(theirs) == size and all(of_peer == seen for of_peer in theirs.values()):
            return PrefixStore(hashlib.sha256(mine.encode()).hexdigest()[:16], store)
        for peer, of_peer in theirs.items():
            seen[peer] = of_peer[peer]
        if json.dumps(seen) != mine:
            mine = json.dumps(seen)
            store.set(keys[rank], mine)
        elif time.monotonic() > deadline:
            there = [peer for peer, of_peer in theirs.items() if seen[rank] in of_peer]
            raise DistBackendError(
                f"lowcomm: expected all {size} ranks at the store within {timeout.total_seconds():.0f} s, got ranks {there}"
            )
        else:
            time.sleep(_PAUSE_S)


def _served(store: Store) -> TCPStore | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _read(store: Store, keys: list[str]) -> list[list[str]]:
    texts = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    return [json.loads(text) for text in texts]
