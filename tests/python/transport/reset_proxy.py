"""A router between ranks that resets the connections it forwards, or keeps what it has seen."""

import select
import socket
import struct
import threading
import time

import torch
import torch.distributed as dist


class ResetProxy:
    """Forwards 127.0.0.1:`port` to another port, and resets every connection `every_s` seconds after it was made.

    `seen` has the bytes of both directions, where there is a bytearray.
    """

    def __init__(self, to, every_s, seen=None):
        self._to, self._every_s, self._seen = to, every_s, seen
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.resets = 0
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        self._over = True
        self._thread.join()
        self._listener.close()

    def _run(self):
        pairs = {}  # socket -> its other end, and when both are reset
        while not self._over:
            ready, _, _ = select.select([self._listener, *pairs], [], [], 0.01)
            for one in ready:
                if one is self._listener:
                    inside = socket.create_connection(("127.0.0.1", self._to))
                    outside, _ = one.accept()
                    end = time.monotonic() + self._every_s
                    pairs[inside], pairs[outside] = (outside, end), (inside, end)
                elif one in pairs and not self._forward(one, pairs[one][0]):
                    self._reset(pairs, one)
            for one in [one for one, (_, end) in pairs.items() if time.monotonic() > end]:
                if one in pairs:
                    self._reset(pairs, one)
        for one in pairs:
            one.close()

    def _forward(self, one, other):
        try:
            got = one.recv(65536)
            if got:
                other.sendall(got)
                if self._seen is not None:
                    self._seen += got
            return bool(got)
        except OSError:
            return False

    def _reset(self, pairs, one):
        other, _ = pairs.pop(one)
        pairs.pop(other)
        for end in (one, other):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
        self.resets += 1


def rounds(proxy, least):
    """Yields `least` times on every rank, and on until the ranks' proxies have each reset three connections.

    Args:
        proxy: This rank's proxy, or None. The ranks agree by an all_reduce before each round.
    """
    done = 0
    while True:
        enough = torch.tensor([done >= least and (proxy is None or proxy.resets > 2)], dtype=torch.int32)
        dist.all_reduce(enough, op=dist.ReduceOp.MIN)
        if enough:
            return
        yield
        done += 1
