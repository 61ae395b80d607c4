"""Refusals of a reader of the wire format: by its own rules, and in the same payloads as the library."""

import random

import numpy as np
import pytest
import torch
from format_reader import Refusal, parse
from format_reader.by_library import library, reader, same, sample, written
from format_reader.grid import buckets

NAN, OTHER_NAN, INF = 0x7FC00000, 0xFFC00000, 0x7F800000


def spoilt(text, n, **changes):
    """A payload with words of 32 bits in other places: `at=offset, to=value`."""
    payload = bytearray(written(text, sample(n)))
    offset = changes["at"] % len(payload)
    payload[offset : offset + 4] = changes["to"].to_bytes(4, "little")
    return bytes(payload)


def refused(text, payload, n):
    """The reader refuses, and so does the library."""
    with pytest.raises(Refusal):
        reader(text, payload, n)
    with pytest.raises(ValueError):
        library(text, payload, n)


GRIDS = ["minmax4", "lattice3", "levels2", "sym5", "mid8:bucket=64", "sign1", "sym3:bucket=tensor", "gauss4"]
CHUNKS = "topk:chunk=64,keep=16,values=sym2"
GRIDS += ["sym2:axis=channel,C=1", "minmax3:meta=bf16", "minmax5:bucket=512,rotate=1", "gauss2:meta=fp32"]


@pytest.mark.parametrize("text", ["none", "fp16", "topk:keep=0.3", CHUNKS, "logbyte", "log9", *GRIDS])
def test_wrong_sizes(text):
    payload = written(text, sample(300))
    for wrong in (b"", payload[:-64], payload[:-1], payload + bytes(64), payload + b"\0"):
        refused(text, wrong, 300)


@pytest.mark.parametrize("text", GRIDS)
def test_padding_of_the_metadata(text):
    refused(text, spoilt(text, 30, at=60, to=1), 30)
    refused(text, spoilt(text, 30, at=60, to=1 << 31), 30)


@pytest.mark.parametrize("text", ["none", "fp16", "bf16", "logbyte", "log9"])
def test_padding_of_codecs_without_metadata(text):
    refused(text, spoilt(text, 13, at=60, to=1 << 31), 13)


def test_the_bits_past_the_last_element_of_log9():
    refused("log9", spoilt("log9", 3, at=0, to=1 << 27), 3)
    same("log9", spoilt("log9", 3, at=0, to=(1 << 27) - 1), 3)


@pytest.mark.parametrize("text", ["minmax4", "sym3:bucket=64", "sign1", "levels2"])
def test_bits_that_are_none_of_an_elements(text):
    bits = parse(text).bits
    for n in (17, 40, 530):  # the last row has 1, 8 and 2 lanes; 2, 3 and 2 rows are in its one word
        rows = -(-(n % 512) // 16)
        refused(text, spoilt(text, n, at=-4, to=1 << bits * (rows - 1)), n)
        refused(text, spoilt(text, n, at=-64, to=1 << bits * rows), n)
        refused(text, spoilt(text, n, at=-64, to=1 << 31), n)


def test_lanes_without_an_element_of_rotated_blocks():
    for n in (1, 5, 517):
        refused("sym4:bucket=512,rotate=1", spoilt("sym4:bucket=512,rotate=1", n, at=-4, to=1 << 28), n)
    same("sym4:bucket=512,rotate=1", spoilt("sym4:bucket=512,rotate=1", 528, at=-4, to=1 << 28), 528)


@pytest.mark.parametrize("text", GRIDS)
def test_scales_that_are_not_finite(text):
    for value in (NAN, OTHER_NAN, INF, 0xFF800000, NAN + 1):
        refused(text, spoilt(text, 300, at=0, to=value), 300)
        if parse(text).has_base and not parse(text).short_meta:
            refused(text, spoilt(text, 300, at=4, to=value), 300)


@pytest.mark.parametrize("text", GRIDS)
def test_only_one_nan_is_poison(text):
    spec = parse(text)
    text += f"{',' if ':' in text else ':'}nonfinite=poison"
    for value in (OTHER_NAN, INF, NAN + 1 if not spec.short_meta else 0x7FC17FC1):
        refused(text, spoilt(text, 300, at=0, to=value), 300)
    if spec.has_base:
        refused(text, spoilt(text, 300, at=0, to=0x3F807FC0 if spec.short_meta else NAN), 300)  # with a step
    elif not spec.short_meta:
        assert np.isnan(same(text, spoilt(text, 300, at=0, to=NAN), 300)[:64]).all()  # whatever the codes are


@pytest.mark.parametrize("text", ["fp16", "bf16"])
def test_casts_that_are_no_finite_number(text):
    for codes in {"fp16": (0x7C00, 0xFC00, 0x7E01, 0xFE00), "bf16": (0x7F80, 0xFF80, 0x7FC1)}[text]:
        refused(text, spoilt(text, 9, at=4, to=codes), 9)
        refused(f"{text}:nonfinite=poison", spoilt(text, 9, at=4, to=codes), 9)
    nan = {"fp16": 0x7E00, "bf16": 0x7FC0}[text]
    refused(text, spoilt(text, 9, at=4, to=nan), 9)
    same(f"{text}:nonfinite=poison", spoilt(text, 9, at=4, to=nan), 9)


def test_headers_and_places_of_topk():
    listed, bitmap = "topk:keep=0.01", "topk:keep=0.5"
    for text in (listed, bitmap):
        for at, to in [(0, 7), (4, 1), (8, 0x0503), (8, 0x00010805 ^ 0x00010000 * (text == listed)), (12, 1)]:
            refused(text, spoilt(text, 1000, at=at, to=to), 1000)
    payload = bytearray(written(listed, sample(1000)))  # 10 places after a count
    for place, other in ((20, payload[22:24]), (38, b"\xe8\x03"), (16, b"\x09\x00"), (40, b"\x01\x00")):
        refused(listed, bytes(payload[:place] + other + payload[place + 2 :]), 1000)
    payload = bytearray(written(bitmap, sample(1001)))
    payload[16] ^= 1
    refused(bitmap, bytes(payload), 1001)
    payload = bytearray(written(bitmap, sample(1001)))
    payload[16 + 125] |= 2
    refused(bitmap, bytes(payload), 1001)


@pytest.mark.parametrize(
    ("at", "changed", "why"),
    [
        (0, "ee", "chunk 0: expected 16, got 15"),
        (0, "ff", "chunk 0: expected 16, got 17"),
        (4, "e0", "chunk 0: expected ascending ones, at least 1, got 0"),
        (2, "0380", "chunk 0: expected below 64, got 64"),
        (8, "6f10e434", "chunk 1: expected below 27, got 27"),
        (11, "64", "chunk 1: expected unused bits of 0, got 1"),
        (12, "01", "padding of the places: expected 0, got 1"),
        (188, "ff", "unused code bits of lane 15"),
    ],
)
def test_places_of_chunks(at, changed, why):
    x = torch.zeros(91)
    x[:16] = x[64:71] = 1.0
    good = written(CHUNKS, x)
    assert good[:12].hex() == "efbd0700e4e4e4e4ef00e424"
    bad = good[:at] + bytes.fromhex(changed) + good[at + len(changed) // 2 :]
    refused(CHUNKS, bad, 91)
    with pytest.raises(ValueError, match=why):
        library(CHUNKS, bad, 91)


def metadata_bits(text, n):
    """The places of bits that decide a scale's sign or double its exponent, which no writer sends."""
    spec = parse(text)
    if spec.name not in {"minmax", "qsgd", "lattice", "levels", "sym", "mid", "sign1", "gauss"}:
        return set()
    width = 16 if spec.short_meta else 32
    count = spec.meta_bytes * buckets(spec, n) * 8 // width
    return {width * i + width - 1 - j for i in range(count) for j in (0, 1)}


def test_any_bit_flipped_is_refused_or_read_alike():
    drawn = random.Random(4)
    texts = [*GRIDS, "qsgd2:bucket=64", "fp16", "bf16", "logbyte", "log9", "topk:keep=0.01", "topk:keep=0.5", CHUNKS]
    outcomes = {True: 0, False: 0}
    for text in texts:
        for n in (1, 17, 500, 513):
            payload, spared = written(text, sample(n)), metadata_bits(text, n)
            for bit in {drawn.randrange(8 * len(payload)) for _ in range(25)} - spared:
                changed = bytearray(payload)
                changed[bit // 8] ^= 1 << bit % 8
                try:
                    reader(text, bytes(changed), n)
                except Refusal:
                    refused(text, bytes(changed), n)
                    outcomes[False] += 1
                else:
                    same(text, bytes(changed), n)
                    outcomes[True] += 1
    assert min(outcomes.values()) > 100, outcomes
