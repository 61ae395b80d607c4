"""`init_method="lowcomm://host:port"`: ranks meet at a store on the port of rank 0's transport, so that a job needs one port."""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse

from torch.distributed import Store
from torch.distributed.constants import default_pg_timeout

from torch_lowcomm import _C


def handler(url: str, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Makes the store of a job; torch.distributed calls it for `lowcomm://`.

    It is torch's TCPStore on rank 0's loopback, which other processes reach by a tunnel through the port that rank 0's endpoint
    has. Rank 0 serves it on the port of its endpoint (LOWCOMM_LISTEN; by default the port of the URL, on all interfaces), the
    others dial. A host or port that the URL leaves out is MASTER_ADDR or MASTER_PORT; rank and world size that
    `init_process_group` is not given are RANK and WORLD_SIZE.

    Args:
        url: "lowcomm://host:port", "lowcomm://".
        timeout: How long to wait for rank 0's port, and for a key by default.

    Yields:
        The store, this process's rank, the number of ranks.

    Raises:
        ValueError: Something is missing, or rank 0 listens on another port than the URL says.
        DistNetworkError: Nobody serves a store there within `timeout`.
    """
    parts = urlparse(url)
    query = dict(parse_qsl(parts.query))
    rank = _number("rank", query.get("rank"), "RANK", url)
    size = _number("world_size", query.get("world_size"), "WORLD_SIZE", url)
    host = parts.hostname or os.environ.get("MASTER_ADDR", "")
    port = _number("port", str(parts.port) if parts.port else None, "MASTER_PORT", url)
    if not host:
        raise ValueError(f"{url}: expected a host in it, or in MASTER_ADDR, got none")
    if rank == 0:
        _listen_on(port)
        yield _C.serve_store(timeout, size), rank, size
    else:
        yield _C.dial_store(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", timeout), rank, size
    raise RuntimeError("lowcomm://: expected one rendezvous, got another")


def _number(name: str, given: str | None, variable: str, url: str) -> int:
    text = given if given is not None else os.environ.get(variable, "")
    if not text.isdecimal():
        raise ValueError(f"{url}: {name}: expected a number in it, or in {variable}, got {text!r}")
    return int(text)


def _listen_on(port: int) -> None:
    """Makes the endpoint of this process listen on the port, or checks that it is reached by it."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    for variable in ("LOWCOMM_ADVERTISE", "LOWCOMM_LISTEN"):
        text = os.environ.get(variable, "")
        if not text:
            continue
        said = text.rpartition(":")[2]
        if not said.isdecimal() or int(said) + local != port:
            raise ValueError(f"lowcomm://: expected {variable} to have rank 0's port, {port - local}, got {text!r}")
        return
    os.environ["LOWCOMM_LISTEN"] = f":{port - local}"
