"""The examples and tables of the wire format's page, as its own words have them and as the reader reads them."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from format_reader import Refusal, codec_of, crc32c, decode, encoded_bytes, parse, read_frame
from format_reader.by_library import written
from format_reader.document import fenced, gauss_levels, page, sign_words, table_after
from format_reader.filling import fnv1a, plan, read_layout
from format_reader.frame import Header, write_frame
from format_reader.spec import IDS
from noise_by_hand import philox

import torch_lowcomm as lc


def floats(text):
    """The numbers in a text, as float32."""
    return np.array([float(word) for word in text.replace("−", "-").split()], np.float32)


def the_frame():
    """The bytes of the page's example."""
    return bytes.fromhex(fenced("frame"))


def test_the_example_frame():
    header, payload = read_frame(the_frame())
    spec = codec_of(header)
    assert spec == parse("minmax2:bucket=64")
    assert (header.dtype, header.elements, header.sequence, header.epoch) == (1, 18, 7, 1)
    values = floats(fenced("values"))
    assert written("minmax2:bucket=64", torch.from_numpy(values)) == payload
    values[17] = 1
    np.testing.assert_array_equal(decode(spec, payload, header.elements), values)
    assert write_frame(header, payload) == the_frame()


def test_the_crc():
    assert crc32c(b"123456789") == 0xE3069283


DECODED = {
    "fp16": "1 -2.5 65504",
    "bf16": "1 3.140625",
    "log9": "1 -2 0",
    "topk:keep=0.5,values=sym2": "0 -4 0 2",
    "topk:chunk=64,keep=8,values=sym2": "0 -4 0 0 0 0 0 0 0 4",
    "sym4:bucket=64,unit=2": "1 1.75 -3 3.5",
    "sym2:axis=channel,C=2": "2 -1 2 0.5 -4 0.5",
    "minmax2:bucket=tensor": "-1 0 1 2",
}


@pytest.mark.parametrize("line", fenced("payloads").splitlines())
def test_the_example_payloads(line):
    text, elements, size, parts = (cell.strip() for cell in line.split("|"))
    x = floats(elements)
    payload = bytearray(int(size))
    for offset, digits in (part.split(":") for part in parts.split()):
        payload[int(offset) : int(offset) + len(digits) // 2] = bytes.fromhex(digits)
    assert encoded_bytes(parse(text), x.size) == len(payload)
    assert written(text, torch.from_numpy(x)) == payload
    got = decode(text, bytes(payload), x.size)
    if text.startswith("log"):
        assert np.isclose(got, x, rtol=0.065).all()
    else:
        np.testing.assert_array_equal(got, floats(DECODED[text]))


def test_the_example_of_codecs_around_0():
    x = torch.from_numpy(floats("−4 −1.9 −0.5 0 0.5 1.9 2.1 4"))
    stated = {"sym2": "−4 −2 0 0 0 2 2 2", "mid2": "−3 −1 −1 1 1 1 3 3"}
    words = " ".join(page().split())
    for text, decoded in stated.items():
        assert decoded in words
        np.testing.assert_array_equal(decode(text, written(text, x), 8), floats(decoded))


def test_the_example_of_gauss():
    payload = np.array([0x3FB504F3], "<u4").tobytes() + bytes(60 + 128)
    assert written("gauss2:meta=fp32", torch.tensor([8.0])) == payload
    assert decode("gauss2:meta=fp32", payload, 1) == np.float32(12.0833406)


def test_the_words_of_signs_are_the_generators():
    words = np.stack(philox(np.arange(4, dtype=np.uint64), 0, 0), axis=1).flatten().tolist()
    assert words[:4] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words == list(sign_words())


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_levels_of_gauss_mirror_and_ascend(bits):
    levels = gauss_levels(bits)
    assert (np.diff(levels) > 0).all() and (levels == -levels[::-1]).all()


def test_the_example_of_filling_frames():
    segments = read_layout(fenced("layout"))
    frames = plan(segments, 65536)
    rows = table_after("| first | elements | payload_bytes |")
    assert [[str(f.first), str(f.elements), str(f.payload_bytes)] for f in frames] == [row[:3] for row in rows]


def test_the_hash_of_a_layout_is_the_librarys():
    text = fenced("layout")
    lines = [line.split(" ", 2) for line in text.splitlines()]
    layout = lc._C.Layout([(int(first), int(count), codec) for first, count, codec in lines])
    assert layout.hash == fnv1a(text)


def test_the_table_of_codecs():
    rows = table_after("| id | text | bits | bucket |")
    named = {re.match(r"`([a-z0-9]+)", row[1])[1]: int(row[0]) for row in rows if row[1].startswith("`")}
    assert named == IDS


def test_the_size_of_the_examples():
    assert encoded_bytes(parse("minmax4"), 1537) == 896


GOOD = Header(b"LCMF", 2, 0, 1, 2, 0, 1, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0)

SPOILT = {
    "magic": {"magic": b"LCMG"},
    "version": {"version": 1},
    "kind": {"kind": 4},
    "codec": {"codec": 17},
    "bits": {"bits": 9},
    "no bits": {"bits": 0},
    "sym1": {"codec": 5, "bits": 1},
    "bits of a cast": {"codec": 11, "bucket": 0},
    "rounding": {"flags": 1},
    "flag 7": {"flags": 128},
    "units of levels": {"codec": 9, "flags": 64},
    "units of channels": {"flags": 16 | 64},
    "units of one bucket": {"flags": 64, "bucket": 0},
    "meta of lattice": {"codec": 4, "flags": 2 | 4},
    "l2 of minmax": {"flags": 8},
    "rotated in a short bucket": {"flags": 32},
    "rotated channels": {"flags": 16 | 32, "bucket": 512},
    "gauss that does not rotate": {"codec": 10, "bucket": 512},
    "channels of levels": {"codec": 9, "flags": 16},
    "no channels": {"flags": 16, "bucket": 0},
    "dtype": {"dtype": 11},
    "dtype of a grid": {"dtype": 4},
    "reserved": {"reserved": 1},
    "bucket": {"bucket": 96},
    "short bucket": {"bucket": 32},
    "long bucket": {"bucket": 131072},
    "bits of a layout": {"codec": 255, "bits": 1, "bucket": 0},
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_reader_of_frames_refuses(what):
    read_frame(write_frame(GOOD, b"payload"))
    with pytest.raises(Refusal):
        read_frame(write_frame(replace(GOOD, **SPOILT[what]), b"payload"))


def test_a_reader_of_frames_refuses_other_sizes_and_any_bit_flipped():
    frame = the_frame()
    for size in (0, 63, 64, 191):
        with pytest.raises(Refusal):
            read_frame(frame[:size])
    assert read_frame(frame + b"\1") == read_frame(frame)
    for bit in range(0, 8 * len(frame), 5):
        spoilt = bytearray(frame)
        spoilt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Refusal):
            read_frame(bytes(spoilt))
