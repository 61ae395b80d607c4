"""Ranks that stay up between calls."""

import itertools
import pathlib
import pickle
import socket
import tempfile
import time
import traceback
from multiprocessing import connection

from ranks.child import Rank, import_from
from ranks.job import GRACE_S, Job, source_of
from ranks.starters import zygote


def serve(rank, address):
    """A pool's rank: one function a message, a store of its own for each, until told to end."""
    import torch
    import torch.distributed as dist

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        conn = connection.Connection(client.detach())
    _send(conn, rank.rank)
    while (message := _receive(conn)) is not None:
        folder, source, body, group = message
        try:
            import_from(source)
            fn, args = pickle.loads(body)
            torch.manual_seed(0)
            caller = Rank(rank.rank, rank.size, folder)
            if group is not None:
                caller.init(**group)
            value = fn(caller, *args)
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
            _send(conn, (True, value))
        except BaseException:
            _send(conn, (False, traceback.format_exc()))
    conn.close()


# By value: torch teaches Connection.send to share tensors' memory, which asks for the sender later.
def _send(conn, message):
    conn.send_bytes(pickle.dumps(message))


def _receive(conn):
    return pickle.loads(conn.recv_bytes())


class Pool:
    """`size` ranks that stay: `pool(fn, *args)` costs milliseconds. A failure ends them; the next call starts others."""

    def __init__(self, size):
        self.size = size
        self.job = None
        self.calls = itertools.count()

    def _open(self):
        self.folder = tempfile.TemporaryDirectory(prefix="pool-")
        address = f"{self.folder.name}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            listener.settimeout(30)
            self.job = Job(zygote(), serve, self.size, (address,), None)
            conns = [connection.Connection(listener.accept()[0].detach()) for _ in range(self.size)]
        self.conns = [conn for _, conn in sorted(((_receive(c), c) for c in conns), key=lambda pair: pair[0])]

    def __call__(self, fn, *args, group=None, timeout=60.0):
        """Runs `fn(Rank, *args)` on every rank and returns their values; the group is destroyed for them after it.

        It begins in a group of `Rank.init(**group)`; None: it makes its own.
        """
        if self.job is None:
            self._open()
        folder = pathlib.Path(self.folder.name) / f"call{next(self.calls)}"
        folder.mkdir()
        for conn in self.conns:
            _send(conn, (str(folder), source_of(fn), pickle.dumps((fn, args)), group))
        answers = [None] * self.size
        end = time.monotonic() + timeout
        why = None
        while None in answers:
            waiting = [c for c, a in zip(self.conns, answers, strict=True) if a is None]
            for conn in connection.wait(waiting, max(0.0, end - time.monotonic())):
                r = self.conns.index(conn)
                try:
                    answers[r] = _receive(conn)
                except EOFError:
                    answers[r] = (False, "its process ended\n")
                if not answers[r][0] and why is None:
                    why = f"rank {r} failed"
                    end = min(end, time.monotonic() + GRACE_S)
            if time.monotonic() >= end and None in answers:
                why = why or f"no answer within {timeout} s"
                break
        if why is None:
            return [value for _, value in answers]
        self.job.kill(self.job.alive(), stacks=[r for r, a in enumerate(answers) if a is None])
        said = "".join(f"---- rank {r} raised\n{a[1]}" for r, a in enumerate(answers) if a and not a[0])
        failure = self.job.report(f"{why}\n{said}")
        self._forget()
        raise failure

    def _forget(self):
        for conn in self.conns:
            conn.close()
        self.job.remove()
        self.job = None
        self.folder.cleanup()

    def close(self, timeout=120.0):
        """Ends the ranks, and checks that each ended cleanly."""
        if self.job is None:
            return
        for conn in self.conns:
            _send(conn, None)
        end = time.monotonic() + timeout
        while (alive := self.job.alive()) and time.monotonic() < end:
            self.job.code(alive[0], 0.05)
        late = self.job.alive()
        self.job.kill(late)
        codes = [self.job.code(r) for r in range(self.size)]
        failure = self.job.report(f"the pool's ranks ended with {codes}") if any(codes) else None
        self._forget()
        if failure:
            raise failure
