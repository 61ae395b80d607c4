"""List the machines at a store, of `lc.Membership` and of `lc.StoreExchange`, and how far they are. Nothing changes there.

The store is the one that the machines were given, `python -m torch_lowcomm store` or another TCPStore.
"""

import argparse
import json
import socket
import time
from datetime import datetime, timedelta

import torch.distributed as dist

from torch_lowcomm._table import aligned
from torch_lowcomm.cli.sockets import host_and_port
from torch_lowcomm.membership.heartbeat import beat_key, is_last, steps_and_place
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.seed_replay.store.commit import Commit

_PATIENCE_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("store", metavar="HOST:PORT", help="of the store")
    parser.add_argument("--prefix", default="", help="of the PrefixStore that the machines use, if they do")


def main(arguments: argparse.Namespace) -> int:
    """Prints a table. Returns 0; ValueError for a wrong address, OSError where no store answers or no machine is there."""
    host, port = host_and_port(arguments.store)
    try:
        socket.create_connection((host, port), _PATIENCE_S).close()
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_PATIENCE_S))
    except (OSError, RuntimeError) as error:
        raise OSError(f"expected a store at {arguments.store}, got {' '.join(str(error).split())[:200]}") from error
    said = []
    for kind in ("lowcomm", "lowcomm/replay"):
        prefix = f"{arguments.prefix}/{kind}".lstrip("/")
        at = PatientStore(dist.PrefixStore(prefix, store), _PATIENCE_S, "status")
        ids = at.find_all([f"id/{number + 1}" for number in range(int(at.find("ids") or 0))])
        if machines := list(dict.fromkeys(value.decode() for value in ids if value)):
            said += ["", *_table(at, machines)]
    if not said:
        raise OSError(
            f"the store at {arguments.store} has no machines under the prefix {arguments.prefix!r} (--prefix)"
        )
    print("\n".join(said[1:]))
    return 0


def _table(at: PatientStore, machines: list[str]) -> list[str]:
    """Reads the signs of life until each machine has given another one, or has left, and says what the store has of them."""
    keys = [beat_key(machine) for machine in machines]
    first = now = [(value or b"").decode() for value in at.find_all(keys)]
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end and any(a == b and not is_last(b) for a, b in zip(first, now, strict=True)):
        time.sleep(0.2)
        now = [(value or b"").decode() for value in at.find_all(keys)]
    number = int(at.find("round") or 0)
    members = json.loads(at.find(f"{number}/members") or "[]")
    rows = []
    for machine, before, value in zip(machines, first, now, strict=True):
        about = json.loads(at.find(f"about/{machine}") or "{}")
        since = f"{datetime.fromtimestamp(about['since_unix_s']):%Y-%m-%d %H:%M:%S}" if about else "-"
        state = "left" if is_last(value) else "alive" if value != before else f"silent for {_PATIENCE_S:g} s"
        steps = "-" if is_last(value) else str(steps_and_place(value)[0])
        group = str(number) if machine in members else "-"
        rows.append([machine, state, since, steps, str(about.get("outer_steps", "-")), group])
    replay = [f"seed replay: iteration {Commit.decode(head).iteration}"] if (head := at.find("head")) else []
    return [*replay, *aligned("machine|state|since|steps|outer steps|in group", rows)]
