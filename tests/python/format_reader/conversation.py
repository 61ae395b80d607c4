"""One rank's side of an all_gather and of a message, spoken from the page: hello, epoch, lanes, description, frames."""

from collections.abc import Callable

from torch._C._distributed_c10d import Store

from format_reader.filling import Frame
from format_reader.frame import Header, read_frame, write_frame
from format_reader.refusal import insist
from format_reader.tcp import DEADLINE_S, Lanes

FIRST_MESSAGE_TAG = 2**28
TAGS = 64  # of an op, and of a message
TURNS = 16  # connections, where they are "auto"
CONTROL_FRAME = 2  # a frame's kind


def message_tag(first: int, k: int) -> int:
    """The transport tag of frame k of a message whose first tag is `first`."""
    return first + (k + first // 128) % TURNS


class Peer:
    """Rank 1 of a group of two, whose rank 0 is the library."""

    def __init__(self, store: Store) -> None:
        hello = store.get("lowcomm/hello/0")
        store.set("lowcomm/hello/1", hello)
        self.hello = hello.decode()
        self.epoch = int(store.get("lowcomm/epoch"))
        # A lane that is dropped closes its connection, perhaps before the other rank has made its group.
        self.lanes = Lanes(store, 1, 2)
        self.control, self.bulk = self.lanes.control[0], self.lanes.bulk[0]
        self.ops = self.messages = 0

    def gather(self, frames: list[Frame]) -> tuple[str, list[tuple[Header, bytes]]]:
        """An op in which this rank sends what rank 0 sends: its description, and the frames of its message."""
        self.ops += 1
        sent, rounds = [], []
        for n, expected in enumerate([None, *frames]):
            tag = TAGS * self.ops + n % TURNS
            frame = self.bulk.receive(tag)
            header, payload = read_frame(frame)
            insist((header.epoch, header.sequence) == (self.epoch, self.ops), "the epoch and the sequence")
            got = Frame(header.first, header.elements, header.payload_bytes)
            insist(expected in (None, got), f"a frame of {got}: expected {expected}")
            rounds.append((header, payload))
            sent.append(self.bulk.send(tag, write_frame(header, payload)))
        for delivered in sent:
            insist(delivered.wait(DEADLINE_S), "a frame that is delivered")
        return rounds[0][1].decode(), rounds[1:]

    def control_header(self, sequence: int) -> Header:
        """Of a control frame."""
        return Header(b"LCMF", 2, CONTROL_FRAME, 0, 0, 0, 0, 0, 0, 0, 0, sequence, self.epoch, 0, 0, 0, 0, 0)

    def receive_message(self, flow: str, description: str, frames: list[Frame]) -> list[tuple[Header, bytes]]:
        """A message of rank 0's, which is announced as expected by `description`."""
        return self.expect_message(flow, description, len(frames))()

    def expect_message(self, flow: str, description: str, frames: int) -> Callable[[], list[tuple[Header, bytes]]]:
        """Announces the receive of a message; the call waits for its frames."""
        first = FIRST_MESSAGE_TAG + TAGS * (2 * self.messages + 1)
        self.messages += 1
        self.tell(f"flow={flow}\nframes={frames}\nfirst tag={first}\n{description}", 1)
        return lambda: [read_frame(self.bulk.receive(message_tag(first, k))) for k in range(frames)]

    def tell(self, text: str, sequence: int) -> None:
        """An announcement or a withdrawal."""
        self.control.send(3, write_frame(self.control_header(sequence), text.encode()))

    def hear_announcement(self) -> tuple[Header, str]:
        """The next announcement of rank 0, or its withdrawal."""
        header, text = read_frame(self.control.receive(3))
        insist(header.epoch == self.epoch and header.kind == CONTROL_FRAME, "an announcement's header")
        return header, text.decode()

    def send_message(self, announcement: str, frames: list[tuple[Header, bytes]]) -> None:
        """A message's frames, once `announcement` has come."""
        first = int(announcement.split("first tag=")[1].split("\n")[0])
        for k, (header, payload) in enumerate(frames):
            self.bulk.send(message_tag(first, k), write_frame(header, payload))
