"""Perturbations by FORMAT.md alone, section "Perturbations": nothing of the library is imported.

python tests/python/noise_by_hand.py          writes tests/golden/noise.txt
"""

import hashlib
import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "noise.txt"
MASK = 2**64 - 1
F32 = np.float32

# kind, first element, count: starts and ends within blocks, and counters of more than 32 bits.
SLICES = [
    ("gaussian", 0, 256),
    ("gaussian", 1, 63),
    ("gaussian", 2047, 2050),
    ("gaussian", 2**34 - 100, 4200),
    ("gaussian", 2**40 + 17, 777),
    ("rademacher", 0, 256),
    ("rademacher", 5, 2043),
    ("rademacher", 2047, 4100),
    ("rademacher", 2**39 - 3000, 6000),
    ("rademacher", 2**45 + 17, 777),
]
SAMPLE, TENSOR = (1, 2, 3, 4), 5


def section():
    text = (ROOT / "csrc" / "wire" / "FORMAT_CODECS.md").read_text()
    return text[text.index("## Perturbations") : text.index("## Subspaces")]


def coefficients():
    """The table of polynomials, by name, lowest power first."""
    rows = re.findall(r"^\| (P|S|C|ln) \|(.*)\|$", section(), re.M)
    return {
        name: np.array([int(c, 16) for c in cells.split("|") if c.strip()], np.uint32).view(F32) for name, cells in rows
    }


def seed_of(*numbers):
    s = 0
    for v in numbers:
        z = ((s ^ v) + 0x9E3779B97F4A7C15) & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        s = z ^ z >> 31
    return s


def philox(counter, seed, stream):
    """Four arrays of words for an array of counters."""
    low = np.uint64(0xFFFFFFFF)
    c = [counter & low, counter >> np.uint64(32), np.full_like(counter, stream), np.zeros_like(counter)]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [q >> np.uint64(32) ^ c[1] ^ np.uint64(k0), q & low, p >> np.uint64(32) ^ c[3] ^ np.uint64(k1), p & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [word.astype(np.uint32) for word in c]


def horner(c, x):
    total = np.full_like(x, c[-1])
    for coefficient in c[-2::-1]:
        total = total * x + coefficient
    return total


def pair(a, w):
    """R·X and R·Y."""
    table = coefficients()
    u = np.minimum((a >> np.uint32(8)).astype(F32) + F32(0.5), F32(2**24 - 1)) * F32(2**-24)
    bits = u.view(np.int32)
    k = (bits - np.int32(0x3F3504F3)) >> 23
    f = (bits - (k << 23)).view(F32) - F32(1)
    r = np.sqrt(k.astype(F32) * table["ln"][0] + f * horner(table["P"], f))
    r = (r.view(np.uint32) | (w & np.uint32(0x80000000))).view(F32)
    x = (w >> np.uint32(8) & np.uint32(2**23 - 1)).astype(F32) * F32(2**-23) - F32(0.5)
    square = x * x
    return r * (horner(table["S"], square) * x), r * horner(table["C"], square)


def noise(kind, seed, tensor, first, count):
    """z[first ... first + count - 1] in float32."""
    e = np.arange(first, first + count, dtype=np.uint64)
    lane = e % np.uint64(16)
    if kind == "rademacher":
        words = np.stack(philox(e // np.uint64(2048) * np.uint64(16) + lane, seed, tensor))
        bit = (e // np.uint64(16) % np.uint64(128)).astype(np.int64)
        word = words[bit // 32, np.arange(count)]
        return np.where(word >> (bit % 32).astype(np.uint32) & np.uint32(1), F32(1), F32(-1))
    words = philox(e // np.uint64(64) * np.uint64(16) + lane, seed, tensor)
    rows = np.stack([*pair(words[0], words[1]), *pair(words[2], words[3])])
    return rows[(e // np.uint64(16) % np.uint64(4)).astype(np.int64), np.arange(count)]


def golden():
    """A line a slice: kind, first, count, SHA-256 of the little-endian values, and the first four of them as bits."""
    lines = []
    for kind, first, count in SLICES:
        z = noise(kind, seed_of(*SAMPLE), TENSOR, first, count)
        bits = " ".join(f"{v:08x}" for v in z[:4].view(np.uint32))
        lines.append(f"{kind} {first} {count} {hashlib.sha256(z.tobytes()).hexdigest()} {bits}\n")
    return "".join(lines)


if __name__ == "__main__":
    GOLDEN.write_text(golden())
    sys.stdout.write(f"wrote {GOLDEN}\n")
