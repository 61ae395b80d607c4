"""Be a relay: where ranks meet that cannot reach each other.

Those ranks have LOWCOMM_RELAY=HOST:PORT. The relay passes on what they say, of which it can read nothing where they have a
secret. With LOWCOMM_SECRET or LOWCOMM_SECRET_FILE it serves ranks that have that secret, else all who ask, 128 connections of
an address: 256 pairs at a time. It runs until it is interrupted; every minute in which it has passed something on it says how
much.
"""

import argparse
import signal
import threading

from torch_lowcomm import _C

_EVERY_S = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--listen", default=":29700", metavar="HOST:PORT", help="where; without HOST on all interfaces (:29700)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Relays until SIGINT or SIGTERM. Returns 0; ValueError if it cannot listen there."""
    relay = _C.Relay(arguments.listen)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    print(f"relay at {', '.join(relay.addresses)}", flush=True)
    said = 0
    while not over.wait(_EVERY_S):
        joined, passed = relay.relayed()
        if passed != said:
            print(f"{joined} connections joined, {passed - said} bytes passed on in {_EVERY_S} s", flush=True)
            said = passed
    return 0
