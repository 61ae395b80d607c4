"""A port with a store, by clients that FORMAT.md does not foresee: rank 0's process lives, serves others, and holds little."""

import contextlib
import hashlib
import hmac
import os
import resource
import struct
import time
from datetime import timedelta

import port_client
import pytest
import ranks
from port_client import CARRIES, DELIVERED, MESSAGE, OFFERED, RELAYS, STORE, Stream, dial, hello, piece, record

from torch_lowcomm import _C

DEADLINE_S = 120.0
SECRET = "b0pBTzHWtmPlKzjrLn7SdrZxdFKFEE9lbYgOxDY3xPI"
MIB = 1 << 20
# torch's own: csrc/distributed/c10d/TCPStoreBackend.hpp
VALIDATE, GET = b"\x00" + struct.pack("<I", 0x3C85F7CE), 3


def _peak_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def _port_of(r, port, attack, secret=None):
    """Rank 0 serves a store until rank 1 says that it is done; what its peak of memory has grown by, in MiB."""
    os.environ["LOWCOMM_TRANSPORT"] = "tcp"
    if secret:
        os.environ["LOWCOMM_SECRET"] = secret
    if r.rank == 0:
        os.environ["LOWCOMM_LISTEN"] = f"127.0.0.1:{port}"
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        store = _C.serve_store(timedelta(seconds=DEADLINE_S))
        store.set("hello", "world")
        store.get("begins")
        before, descriptors = _peak_mib(), len(os.listdir("/proc/self/fd"))
        store.get("done")
        while len(os.listdir("/proc/self/fd")) > descriptors + 128:  # the test's deadline ends this
            time.sleep(0.05)
        return _peak_mib() - before
    store = _C.dial_store(f"127.0.0.1:{port}", timedelta(seconds=60))
    store.set("begins", "1")
    attack(port, store)
    assert store.get("hello") == b"world", "who was there is served"
    # Those who have hung up may not be found out yet.
    assert _C.dial_store(f"127.0.0.1:{port}", timedelta(seconds=60)).get("hello") == b"world", "and who comes later"
    store.set("done", "1")
    return 0.0


def _grown_mib(attack, secret=None):
    return ranks.run_ranks(_port_of, 2, ranks.free_port(), attack, secret, timeout=DEADLINE_S)[0]


def _hang_up(port, _):
    for i in range(600):  # twice as many as rank 0 may have descriptors
        connection = dial(port)
        connection.sendall(hello(STORE, 1 + i, 0, incarnation=i))
        connection.close()


def test_hellos_that_are_hung_up_on_keep_nobody_out():
    _grown_mib(_hang_up)


def _hold(port, store):
    streams = [Stream(port) for _ in range(100)]
    assert sum(stream.flags == CARRIES for stream in streams) <= 8
    assert store.get("hello") == b"world"
    for stream in streams:
        stream.close()


def test_an_address_has_so_many_streams():
    _grown_mib(_hold)


def _claim(port, _):
    for claims in (
        piece(record(MESSAGE, 0, 0, 64 * MIB)),  # more than a stream's messages have
        piece(record(MESSAGE, 5, 0, 300_000)),  # of a tag that nobody receives
        piece(record(MESSAGE, 0, 0, 1 << 60)),
        piece(record(DELIVERED, 0, 7, 0)),
        struct.pack("<IIQ", 0xFFFFFFFF, 0, 0),
        piece(b"", received=1 << 40),
        b"garbage " * 100,
    ):
        stream = Stream(port)
        assert stream.flags == CARRIES
        stream.connection.sendall(claims)
        assert stream.ends()
        stream.close()


def test_sizes_that_are_claimed_end_their_stream():
    assert _grown_mib(_claim) < 100


def _empty(port, _):
    for kind in (MESSAGE, OFFERED):
        stream = Stream(port)
        with pytest.raises(ConnectionError):  # after some thousands
            for first in range(0, 600_000, 5000):
                stream.say(b"".join(record(kind, 5, number, 0) for number in range(first, first + 5000)))
        stream.close()


def test_empty_messages_are_counted():
    assert _grown_mib(_empty) < 50


def _pipeline(port, store):
    """Asks without waiting for answers, takes them late, and hangs up on others."""
    long = b"A" * (3 * MIB)
    for key in ("long", "longer"):
        store.set(key, long)
    for hangs_up in (True, False) * 3:
        stream = Stream(port)
        ask = b"".join(struct.pack("<BQ", GET, len(key)) + key for key in (b"/long", b"/hello", b"/longer"))
        stream.send(VALIDATE + ask)
        if hangs_up:
            stream.receive(100_000)
            stream.close()
            continue
        for i in range(3):  # what else comes to rank 0's memory meanwhile
            store.set(f"other {i}", b"SECRET--" * 300_000)
        for value in (long, b"world", long):
            assert stream.receive(8) == struct.pack("<Q", len(value))
            assert stream.receive(len(value)) == value
        stream.close()


def test_answers_are_those_of_the_questions():
    _grown_mib(_pipeline)


def _garbage(port, _):
    stream = Stream(port)
    with contextlib.suppress(ConnectionError):  # torch's server hangs up, maybe before all is sent
        stream.send(b"\xff" * 500_000)
    assert stream.ends()
    stream.close()


def test_a_stream_that_the_server_hangs_up_on_ends():
    _grown_mib(_garbage)


def _joined(port, group, codes=(bytes(32), bytes(32)), incarnations=(1, 2)):
    """Whether two strangers are joined by the relay of a port."""
    ends = [dial(port), dial(port)]
    for i, end in enumerate(ends):
        end.sendall(hello(group, 7 + i, 8 - i, 1, incarnations[i], flags=RELAYS) + codes[i])
    answers = [port_client.received(end, 64) for end in ends]
    if any(len(answer) < 64 for answer in answers):
        return False
    ends[0].sendall(b"any bytes")
    return port_client.received(ends[1], 9) == b"any bytes"


def _relay(port, _):
    assert not _joined(port, STORE)
    assert not _joined(port, bytes(16))


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_port_with_a_store_relays_for_no_stranger(secret):
    if secret and not _C.tls_library():
        pytest.skip("this build has no OpenSSL")
    _grown_mib(_relay, secret)


def _relay_process(r):
    os.environ["LOWCOMM_SECRET"] = SECRET
    relay = _C.Relay("127.0.0.1:0")
    port = int(relay.addresses[0].rpartition(":")[2])
    extracted = hmac.new(bytes(32), SECRET.encode(), hashlib.sha256).digest()
    codes = [
        hmac.new(extracted, b"lowcomm relay 1" + hello(STORE, 7 + i, 8 - i, 1, 1 + i, flags=RELAYS) + b"\x01", "sha256")
        for i in range(2)
    ]
    assert not _joined(port, STORE)
    assert _joined(port, STORE, [code.digest() for code in codes])
    assert relay.relayed()[1] == 9


def test_a_relay_with_a_secret_asks_for_the_code_of_the_page():
    if not _C.tls_library():
        pytest.skip("this build has no OpenSSL")
    ranks.run_ranks(_relay_process, 1, timeout=DEADLINE_S)
