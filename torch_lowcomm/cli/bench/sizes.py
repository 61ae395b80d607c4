"""Reads numbers of the command line: sizes in bytes, rates in bits a second, and a sweep of sizes."""

import re

_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def byte_size(text: str) -> int:
    """Returns the bytes of a text such as "64M", above 0; K, M and G are powers of 1024, as in nccl-tests."""
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found or int(found[1]) == 0:
        raise ValueError(f"expected a size above 0 in bytes such as 65536, 64K or 1M, got {text!r}")
    return int(found[1]) * _BINARY[found[2].upper()]


def bit_rate(text: str) -> float:
    """Returns the bits a second of a text such as "100M" or "100Mbit", above 0; k, M and G are powers of 1000, as for links."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:bit(?:/s)?)?", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) == 0:
        raise ValueError(f"expected a rate above 0 in bits a second such as 100M or 2.5Gbit, got {text!r}")
    return float(found[1]) * _DECIMAL[found[2].lower()]


def sweep(least: int, most: int, step: int, factor: int | None) -> list[int]:
    """Returns the sizes (bytes) from `least` to `most`, each `factor` times the last, or, without one, `step` more."""
    if least > most:
        raise ValueError(f"expected -b no larger than -e, got {least} and {most} bytes")
    if factor is not None and factor < 2:
        raise ValueError(f"expected -f of at least 2, got {factor}")
    if step < 1:
        raise ValueError(f"expected -i of at least 1 byte, got {step}")
    sizes = [least]
    while (size := sizes[-1] * factor if factor else sizes[-1] + step) <= most:
        sizes.append(size)
    return sizes
