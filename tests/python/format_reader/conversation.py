"""One rank's side of an all_gather and of a message, spoken from the page: hello, epoch, lanes, description, frames."""

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work
from torch.distributed import PrefixStore

from format_reader.filling import Frame
from format_reader.frame import HEADER, Header, read_frame, write_frame
from format_reader.refusal import insist

LARGEST = 262144  # with chunks of that, and of 65,536
FIRST_P2P_TAG = 2**30
FIRST_CHANNEL_TAG = 2**29
CONTROL_FRAME = 2  # a frame's kind


def fnv1a(text: str) -> int:
    """The page's hash of a text."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def lanes(store: Store, timeout: timedelta) -> list[ProcessGroupGloo]:
    """Connect as rank 1 of 2: the host's backend first, then the lanes `control` and `bulk`."""
    made = []
    for prefix in ("host", "lowcomm/lane/control/lane", "lowcomm/lane/bulk/lane"):
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_default_device()]
        options._timeout = timeout
        made.append(ProcessGroupGloo(PrefixStore(prefix, store), 1, 2, options))
    return made


class Peer:
    """Rank 1 of a group of two, whose rank 0 is the library."""

    def __init__(self, store: Store, timeout: timedelta) -> None:
        hello = store.get("lowcomm/hello/0")
        store.set("lowcomm/hello/1", hello)
        self.hello = hello.decode()
        self.epoch = int(store.get("lowcomm/epoch"))
        # A lane that is dropped closes its connection, perhaps before the other rank has made its group.
        self.host, self.control, self.bulk = lanes(store, timeout)
        self.pending: list[Work] = []

    def receive(self) -> tuple[Header, bytes]:
        """The next frame of the bulk lane."""
        buffer = torch.zeros(HEADER.size + LARGEST, dtype=torch.uint8)
        self.bulk.recv([buffer], 0, 0).wait()
        header, payload = read_frame(buffer.numpy().tobytes())
        insist(header.epoch == self.epoch, "the epoch")
        return header, payload

    def send(self, header: Header, payload: bytes) -> None:
        """A frame, which is kept until it is sent."""
        frame = torch.from_numpy(np.frombuffer(write_frame(header, payload), np.uint8).copy())
        self.pending.append(self.bulk.send([frame], 0, 0))

    def gather(self, frames: list[Frame]) -> tuple[str, list[tuple[Header, bytes]]]:
        """An op in which this rank says what rank 0 says: its description, and the frames of its message."""
        head, description = self.receive()
        self.send(head, description)
        rounds = []
        for expected in frames:
            header, payload = self.receive()
            insist(header.sequence == head.sequence, "the sequence")
            got = Frame(header.first, header.elements, header.payload_bytes)
            insist(got == expected, f"a frame of {got}: expected {expected}")
            rounds.append((header, payload))
            self.send(header, payload)
        for work in self.pending:
            work.wait()
        self.pending.clear()
        return description.decode(), rounds

    def control_header(self, sequence: int) -> Header:
        """Of a control frame."""
        return Header(b"LCMF", 2, CONTROL_FRAME, 0, 0, 0, 0, 0, 0, 0, 0, sequence, self.epoch, 0, 0, 0, 0, 0)

    def transport_tag(self, flow: str, k: int) -> int:
        """Of frame k of a message of `tag 7` or `channel 2`."""
        kind, number = flow.split()
        if kind == "tag":
            return FIRST_P2P_TAG + int(number)
        connections = self.hello.split("connections=")[1].split("\n")[0]
        turns = 1 if connections == "auto" else int(connections)  # over gloo
        return FIRST_CHANNEL_TAG + 256 * int(number) + k % min(turns, 256)

    def receive_message(self, flow: str, description: str, frames: list[Frame]) -> list[tuple[Header, bytes]]:
        """A message of rank 0's, which is announced as expected by `description`."""
        return self.expect_message(flow, description, [frame.payload_bytes for frame in frames])()

    def expect_message(self, flow: str, description: str, sizes: list[int]) -> Callable[[], list[tuple[Header, bytes]]]:
        """Posts and announces the receive of a message; the call waits for its frames."""
        buffers = [torch.zeros(HEADER.size + max(size, 1024), dtype=torch.uint8) for size in sizes]
        coming = [self.bulk.recv([buffer], 0, self.transport_tag(flow, k)) for k, buffer in enumerate(buffers)]
        self.tell(f"flow={flow}\nframes={len(sizes)}\n{description}", 1)

        def wait() -> list[tuple[Header, bytes]]:
            for work in coming:
                work.wait()
            return [read_frame(buffer.numpy().tobytes()) for buffer in buffers]

        return wait

    def tell(self, text: str, sequence: int) -> None:
        """An announcement or a withdrawal."""
        frame = np.frombuffer(write_frame(self.control_header(sequence), text.encode()), np.uint8).copy()
        self.control.send([torch.from_numpy(frame)], 0, 3).wait()

    def hear_announcement(self) -> tuple[Header, str]:
        """The next announcement of rank 0, or its withdrawal."""
        buffer = torch.zeros(HEADER.size + 4096, dtype=torch.uint8)
        self.control.recv([buffer], 0, 3).wait()
        header, text = read_frame(buffer.numpy().tobytes())
        insist(header.epoch == self.epoch and header.kind == CONTROL_FRAME, "an announcement's header")
        return header, text.decode()

    def send_message(self, flow: str, frames: list[tuple[Header, bytes]]) -> None:
        """A message's frames, once they are announced."""
        works = []
        for k, (header, payload) in enumerate(frames):
            frame = np.frombuffer(write_frame(header, payload), np.uint8).copy()
            works.append(self.bulk.send([torch.from_numpy(frame)], 0, self.transport_tag(flow, k)))
        for work in works:
            work.wait()
