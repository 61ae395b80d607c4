"""A client of a port without a secret, written from csrc/wire/FORMAT.md alone (TCP; A byte stream): it waits for nothing."""

import random
import socket
import struct

from format_reader.tcp import DEADLINE_S, DELIVERED, MESSAGE, hello, piece, received, record

STORE = b"lowcomm's store "


def dial(port):
    """A connection to 127.0.0.1:`port`, with a deadline."""
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


class Stream:
    """A byte stream to the server behind a port."""

    def __init__(self, port):
        self.connection = dial(port)
        self.connection.sendall(hello(STORE, random.randrange(1, 2**31), 0, incarnation=random.getrandbits(64)))
        received(self.connection, 64)  # the answer
        self._sent = self._come = 0
        self._in, self._bytes = bytearray(), bytearray()

    def say(self, body):
        """Bytes of the channel, in a piece."""
        self.connection.sendall(piece(body, self._come))

    def send(self, data):
        """Bytes of the stream, however many are under way."""
        for at in range(0, len(data), 65536):
            part = data[at : at + 65536]
            self.say(record(MESSAGE, 0, self._sent, len(part)) + part)
            self._sent += 1

    def receive(self, size):
        """So many bytes of the stream; fewer where it ends. Says of each message that it was delivered."""
        while len(self._bytes) < size and self._piece():
            while len(self._in) >= 24:
                kind, _, number, length = struct.unpack_from("<IIQQ", self._in)
                body = length if kind == MESSAGE else 0
                if len(self._in) < 24 + body:
                    break
                self._bytes += self._in[24 : 24 + body]
                del self._in[: 24 + body]
                if kind == MESSAGE:
                    self.say(record(DELIVERED, 0, number, 0))
        got = bytes(self._bytes[:size])
        del self._bytes[:size]
        return got

    def _piece(self):
        header = received(self.connection, 16)
        if len(header) < 16:
            return False
        size, flags, _ = struct.unpack("<IIQ", header)
        body = received(self.connection, size)
        self._come += len(body)
        self._in += body
        return len(body) == size and not flags & 1

    def close(self):
        self.connection.close()
