"""The account of one process: ops under way, bytes, errors, connections and progress, as JSON has them."""

import socket
from collections.abc import Mapping
from typing import Any

from torch_lowcomm.groups import connections, flight_record
from torch_lowcomm.summary import summary

notes: dict[str, dict[str, Any]] = {}


def note(method: str, **figures: Any) -> None:
    """Replaces what a method notes of its progress, figures that JSON has. Readers on other threads never ask the method."""
    notes[method] = figures


def account() -> dict[str, Any]:
    """Returns what this process does at the moment. It asks no other process, and may be called on any thread.

    Returns:
        {"host", "ops" (as `lc.summary` has them), "notes" (by method), "groups": {name: {"rank" (in the group), "ops"
        (of `lc.flight_record`, those not done), "idle_s" (since the last one ended, None before the first), "last" (its name),
        "links" (by peer)}}}. Groups of one rank, and groups that are over, are left out.
    """
    links = connections()
    groups = {name: _group(record, links.get(name, [])) for name, record in flight_record().items()}
    return {
        "host": socket.gethostname(),
        "ops": summary().ops,
        "notes": dict(notes),
        "groups": {name: group for name, group in groups.items() if group["links"]},
    }


def _group(record: Mapping[str, Any], links: list[dict[str, Any]]) -> dict[str, Any]:
    done = [op for op in record["ops"] if op["ended_s"] is not None]
    last = max(done, key=lambda op: op["ended_s"], default=None)
    return {
        "rank": record["rank"],
        "ops": [op for op in record["ops"] if op["ended_s"] is None],
        "idle_s": -last["ended_s"] if last else None,
        "last": f"{last['op']} {last['sequence']}" if last else "",
        "links": {str(of["peer"]): _link([lane for lane in links if lane["peer"] == of["peer"]]) for of in links},
    }


def _link(lanes: list[dict[str, Any]]) -> dict[str, Any]:
    """All connections to one peer; "round_trip_s" and "path" are of those that there are at the moment."""
    there = [of for of in lanes if of["connected"]]
    return {
        "connected": len(there) == len(lanes),
        "cuts": sum(max(of["times_made"] - 1, 0) for of in lanes),
        "sent_bytes": sum(of["sent_bytes"] for of in lanes),
        "retransmitted": sum(of["retransmitted"] for of in lanes),
        "round_trip_s": min((of["round_trip_s"] for of in there), default=None),
        "path": ", ".join(sorted({of["path"] for of in there})),
        "cipher": ", ".join(sorted({of["cipher"] for of in there} - {""})),
    }
