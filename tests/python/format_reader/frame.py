"""Frames: a header of 64 bytes and its checks, in the page's order."""

import struct
from dataclasses import astuple, dataclass

from format_reader.refusal import insist
from format_reader.spec import FIXED_BITS, GRID, IDS, Spec

HEADER = struct.Struct("<4sBBBBBBHIQQIIIIQII")
NAMES = {number: name for name, number in IDS.items()}
LAYOUT = 255
ROUNDING = {"qsgd": 1, "lattice": 2}
META, L2, CHANNEL, ROTATED, UNITS = 4, 8, 16, 32, 64


def crc_table() -> list[int]:
    """CRC-32C, a byte at a time."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


TABLE = crc_table()


def crc32c(data: bytes) -> int:
    """The Castagnoli CRC of RFC 3720."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ TABLE[(value ^ byte) & 255]
    return value ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Header:
    """The fields, in the order of their bytes."""

    magic: bytes
    version: int
    kind: int
    codec: int
    bits: int
    flags: int
    dtype: int
    reserved: int
    bucket: int
    elements: int
    first: int
    sequence: int
    epoch: int
    channel: int
    state_version: int
    key_hash: int
    payload_bytes: int
    crc: int


def check_flags(name: str, flags: int) -> None:
    """The flags that a codec's text can have."""
    insist(flags & 3 == ROUNDING.get(name, 0), f"rounding {flags & 3} of {name}")
    insist(flags < 128, f"flags {flags}")
    insist(not flags & META or (name in GRID and name != "lattice"), f"bf16 metadata of {name}")
    insist(not flags & L2 or name in ("sym", "mid"), f"range=l2 of {name}")
    by_channel, rotated = bool(flags & CHANNEL), bool(flags & ROTATED)
    insist(not by_channel or (name in GRID and name != "levels"), f"axis=channel of {name}")
    insist(rotated if name == "gauss" else not rotated or (name in GRID and name != "levels"), f"rotation of {name}")
    insist(not (by_channel and rotated), "channels that are rotated")
    insist(not flags & UNITS or (name in GRID and name != "levels" and not by_channel), f"units of {name}")


def check_bucket(name: str, flags: int, bucket: int) -> None:
    """A bucket's or chunk's size, or the number of channels."""
    if name not in GRID and name != "topk":
        insist(bucket == 0, f"a bucket of {name}")
    elif flags & CHANNEL:
        insist(1 <= bucket <= 65536, f"{bucket} channels")
    else:
        smallest = 512 if flags & ROTATED else 64
        power = bucket & (bucket - 1) == 0 and smallest <= bucket <= 65536
        insist(power or (bucket == 0 and not flags & (ROTATED | UNITS)), f"a bucket of {bucket}")


def check_codec(header: Header) -> None:
    """Codec, bits, flags and bucket, as the page's tables have them together."""
    if header.codec == LAYOUT:
        insist((header.bits, header.flags, header.bucket) == (0, 0, 0), "a layout's bits, flags and bucket")
        return
    insist(header.codec in NAMES, f"codec {header.codec}")
    name = NAMES[header.codec]
    if name in FIXED_BITS or name not in GRID:
        insist(header.bits == FIXED_BITS.get(name, 0), f"{header.bits} bits of {name}")
    else:
        insist((2 if name == "sym" else 1) <= header.bits <= 8, f"{header.bits} bits of {name}")
    check_flags(name, header.flags)
    insist(0 <= header.dtype <= 10, f"dtype {header.dtype}")
    insist(name == "none" or 1 <= header.dtype <= 3, f"dtype {header.dtype} of {name}")
    check_bucket(name, header.flags, header.bucket)


def codec_of(header: Header) -> Spec:
    """Returns the codec as the header tells it; gain, keep, unit and nonfinite are in none."""
    by_channel = bool(header.flags & CHANNEL)
    return Spec(
        name=NAMES[header.codec],
        bits=header.bits,
        bucket=0 if by_channel else header.bucket,
        channels=header.bucket if by_channel else 0,
        short_meta=bool(header.flags & META),
        rotated=bool(header.flags & ROTATED),
    )


def read_frame(frame: bytes) -> tuple[Header, bytes]:
    """A frame's header and payload, or a refusal; what lies past the payload is not looked at."""
    insist(len(frame) >= HEADER.size, f"{len(frame)} bytes are no header")
    header = Header(*HEADER.unpack_from(frame))
    at_hand = len(frame) - HEADER.size
    insist(header.magic == b"LCMF", f"magic {header.magic!r}")
    insist(header.version == 2, f"version {header.version}")
    insist(header.payload_bytes <= at_hand, f"{at_hand} bytes of {header.payload_bytes}")
    payload = frame[HEADER.size :][: header.payload_bytes]
    insist(header.crc == crc32c(frame[:60] + payload), "the CRC")
    insist(header.reserved == 0, f"reserved {header.reserved}")
    insist(header.kind <= 3, f"kind {header.kind}")
    check_codec(header)
    return header, payload


def write_frame(header: Header, payload: bytes) -> bytes:
    """A frame with its size and CRC made right, for tests."""
    fields = (*astuple(header)[:-2], len(payload))
    head = HEADER.pack(*fields, 0)[:60]
    return head + struct.pack("<I", crc32c(head + payload)) + payload
