"""The environment variables that the package reads, and a warning about those that it does not know."""

import difflib
from collections.abc import Iterable

from torch_lowcomm._log import logger

# tests/python/package/test_variables.py compares them with the sources. Those of setup.py are known, too.
KNOWN = (
    "LOWCOMM_ADVERTISE",
    "LOWCOMM_AS_GLOO",
    "LOWCOMM_CHUNK_BYTES",
    "LOWCOMM_CONGESTION",
    "LOWCOMM_CONNECTIONS",
    "LOWCOMM_CUDA",
    "LOWCOMM_DIAL_ONLY",
    "LOWCOMM_ENCODE_ON_DEVICE",
    "LOWCOMM_FLIGHT_DIR",
    "LOWCOMM_FLIGHT_RECORD",
    "LOWCOMM_KERNELS",
    "LOWCOMM_LISTEN",
    "LOWCOMM_METRICS",
    "LOWCOMM_MIN_BYTES",
    "LOWCOMM_NCCL",
    "LOWCOMM_OPENSSL",
    "LOWCOMM_POLICY",
    "LOWCOMM_RATE",
    "LOWCOMM_RELAY",
    "LOWCOMM_SECRET",
    "LOWCOMM_SECRET_FILE",
    "LOWCOMM_SEED",
    "LOWCOMM_SOCKET_IFNAME",
    "LOWCOMM_SUMMARY",
)
_OURS = "LOWCOMM_"
_TESTS = "LOWCOMM_TEST_"  # read by the project's tests


def unknown(names: Iterable[str]) -> list[str]:
    """Names that begin as the package's variables do but are none of them, each with the known name that may be meant."""
    texts, known = [], [name.removeprefix(_OURS) for name in KNOWN]
    for name in sorted(names):
        if name.startswith(_OURS) and not name.startswith(_TESTS) and name not in KNOWN:
            near = difflib.get_close_matches(name.removeprefix(_OURS), known, n=1)
            texts.append(f"{name} (did you mean {_OURS}{near[0]}?)" if near else name)
    return texts


def warn_of_unknown(names: Iterable[str]) -> None:
    """Logs one warning that names all of them."""
    if texts := unknown(names):
        logger.warning(
            "environment variables without effect: %s. torch_lowcomm reads no variables of these names; docs/settings.md "
            "lists those that it reads",
            ", ".join(texts),
        )
