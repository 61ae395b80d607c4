"""Snapshots of the weights, for machines to which the log does not reach back (PROTOCOL.md, "Snapshots")."""

import json
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.seed_replay.checkpoint import write_whole


class Snapshots:
    """The keys `snapshot` and `snapshot/<iteration>`, written on a thread with a client of its own. Several machines may write
    at a time, as a link may be slow; `compare_set` moves `snapshot` on, to later ones only. The arguments are
    `StoreExchangeOptions.snapshot…`.
    """

    def __init__(self, client: Callable[[], PatientStore], every: int, folder: Path | None) -> None:
        self._client, self._every, self._folder = client, every, folder
        self._save: Callable[[], bytes] | None = None
        self._load: Callable[[bytes], None] | None = None
        self._store: PatientStore | None = None
        self._thread: threading.Thread | None = None

    def attach(self, save: Callable[[], bytes], load: Callable[[bytes], None]) -> None:
        """Sets how weights and the core's iteration become bytes, and how they are set to these bytes again."""
        self._save, self._load = save, load

    @property
    def sent_bytes(self) -> int:
        """Bytes that this machine sent to the store for snapshots."""
        return self._store.sent_bytes if self._store is not None else 0

    # ---- the leader of the iteration before writes a snapshot ----
    def due(self, iteration: int) -> bool:
        """Whether a snapshot is to be made before an iteration."""
        return self._every > 0 and iteration % self._every == 0 and self._save is not None

    def write(self, core: _C.SeedReplay, begun: int, forget: Callable[[PatientStore, int], None]) -> None:
        """Puts a snapshot to the store or the folder while the caller goes on; then deletes what it replaces, by `forget` the
        log before an iteration. `begun` is the run's first iteration at this store.
        """
        if self._save is None or (self._thread is not None and self._thread.is_alive()):
            return  # the link is slow, and one at a time is enough
        if self._store is None:
            self._store = self._client()
        made = (core.iteration, core.checksum(), self._save(), begun)
        self._thread = threading.Thread(target=self._write, args=(*made, forget), name="lowcomm-snapshot", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Waits for the snapshot under way."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(
        self, iteration: int, checksum: int, value: bytes, begun: int, forget: Callable[[PatientStore, int], None]
    ) -> None:
        store = self._store
        assert store is not None
        try:
            if not self._claim(store, iteration):
                return
            if self._folder is None:
                store.put_large(f"snapshot/{iteration}", value)
            else:
                write_whole(self._path(iteration), lambda part: part.write_bytes(value))
            there = self._list(store, {"iteration": iteration, "checksum": checksum, "bytes": len(value)})
            if there is None:
                logger.info("SeedReplay: no snapshot of iteration %d: there is a later one", iteration)
                self._remove(store, iteration, len(value))
            elif there:
                # Deletes the third last, and those that a machine began and died over. A joiner may read the last but one now.
                first = there[0]["iteration"] if len(there) == 2 else (begun // self._every + 1) * self._every
                for gone in range(first, there[-1]["iteration"], self._every):
                    self._remove(store, gone, len(value))
                forget(store, there[-1]["iteration"])
        except (ConnectionError, OSError) as error:
            logger.warning("SeedReplay: no snapshot of iteration %d: %s", iteration, error)

    @staticmethod
    def _claim(store: PatientStore, iteration: int) -> bool:
        """Whether this machine writes the snapshot of an iteration: after a takeover two machines may think so."""
        mine = secrets.token_hex(8).encode()
        return store.set_first(f"snapshot/{iteration}/by", mine) == mine

    @staticmethod
    def _list(store: PatientStore, told: dict[str, int]) -> list[dict[str, int]] | None:
        """Lists a snapshot as the latest; returns those listed before it, or None if one of them is as late."""
        while True:
            value = store.find("snapshot") or b""
            there = json.loads(value or b"[]")
            if there and there[-1]["iteration"] >= told["iteration"]:
                return None
            desired = json.dumps([*there, told][-2:]).encode()
            if store.swap("snapshot", value, desired) == desired:
                return there

    # ---- a machine that joins takes one ----
    def take(self, store: PatientStore, core: _C.SeedReplay, *, after: int) -> bool:
        """Sets the core's weights to the latest snapshot; returns False if there is none of an iteration after `after`. A
        damaged one is warned of, and the one before is taken; where none is as the list says it is a ValueError.
        """
        if self._load is None:
            return False
        damaged = None
        for told in reversed(json.loads(store.find("snapshot") or b"[]")):
            value = self._read(store, told["iteration"]) if told["iteration"] > after else None
            if value is None:
                continue  # deleted meanwhile
            expected = f"iteration {told['iteration']} with checksum {told['checksum']:#010x}"
            try:
                self._load(value)
            except Exception as error:
                damaged = ValueError(f"SeedReplay: snapshot: expected weights of {expected}, got {error}")
            else:
                found = core.iteration, core.checksum()
                if found == (told["iteration"], told["checksum"]):
                    return True
                damaged = ValueError(
                    f"SeedReplay: snapshot: expected weights of {expected}, got iteration {found[0]} and {found[1]:#010x}"
                )
            logger.warning("%s", damaged)
        if damaged is not None:
            raise damaged
        return False

    def _read(self, store: PatientStore, iteration: int) -> bytes | None:
        if self._folder is None:
            found = store.find_large(f"snapshot/{iteration}")
            return None if found is None else found[1]
        path = self._path(iteration)
        return path.read_bytes() if path.exists() else None

    def _remove(self, store: PatientStore, iteration: int, size: int) -> None:
        if self._folder is None:
            store.delete_large_later(f"snapshot/{iteration}", size)
        else:
            self._path(iteration).unlink(missing_ok=True)
            self._path(iteration).with_suffix(".part").unlink(missing_ok=True)
        store.delete_later([f"snapshot/{iteration}/by"])

    def _path(self, iteration: int) -> Path:
        assert self._folder is not None
        return self._folder / f"snapshot-{iteration}.pt"
