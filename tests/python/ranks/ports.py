"""A port for those who must say it before they listen there."""

import random
import socket

_SYSTEM = random.SystemRandom()  # forked ranks share the seed of `random`


def free_port():
    """A port that nobody has on any address, below those that the system gives to connections (32768 and above)."""
    while True:
        port = _SYSTEM.randrange(20000, 32000)
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
        return port
