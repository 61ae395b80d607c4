"""Tell what reaches what: hosts dial each other's addresses, and are told round trips, rates and what to set.

Start it on every host as the job will be started, with torchrun or another launcher. The ranks meet at torch's store and make no
group, so it also runs where none can be made. The first rank of each host takes part. It listens on all interfaces, on the
port of LOWCOMM_LISTEN (any free one without), and one of them dials at a time: the IPv4 address of each interface, and its IPv6
addresses in turn if that does not answer. Rank 0 prints.

columns
  from, to       two ranks; the first one dials
  by, address    the second one's network interface, and its address; "advertised" is LOWCOMM_ADVERTISE
  rtt            us, median of 20 round trips of 64 bytes
  there, back    goodput in Mbit/s (10^6) as the receiver sees it, one way at a time: bytes after the first sixth
                 / the time that they took. This leaves out TCP's start and the burst of a shaper
  there*, back*  goodput with both ways busy
An address that does not answer has the reason in their place.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torch_lowcomm.cli.link import measure
from torch_lowcomm.cli.machine import heading, machine, versions
from torch_lowcomm.cli.sockets import Connection, Listener, chosen_interface, host_and_port, interfaces

_PATIENCE_S, _ACCEPT_S, _QUEUE_S = 3.0, 8.0, 60.0  # for a dial, on both sides; and for what a link's queue may hold
_NAMES = ("from", "to", "by", "address", "rtt", "there", "back", "there*", "back*")
_ROW = "{:>5}{:>5}{:>11}{:>40}{:>10}{:>10}{:>10}{:>10}{:>10}"
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=1.5, metavar="S", help="of each direction's filling (1.5)")
    parser.add_argument("--timeout", type=float, default=120, metavar="S", help="until all ranks have come (120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rank 0 writes the rows, for `plan --link FILE`")


def main(arguments: argparse.Namespace) -> int:
    """Runs as one rank. Returns 0, or 1 where a host has no address that works; ValueError or OSError where it cannot examine."""
    try:
        if arguments.seconds <= 0:
            raise ValueError(f"--seconds: expected more than 0, got {arguments.seconds:g}")
        store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=arguments.timeout))))
        store = dist.PrefixStore("lowcomm_doctor", store)
        return _Doctor(arguments.seconds, store, rank, ranks, arguments.json).run()
    except ValueError as error:
        raise ValueError(
            f"{error} (a launcher such as torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT)"
        ) from error
    except (RuntimeError, OSError) as error:
        who, host, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
        raise OSError(f"rank {who}, with the store at {host}:{port}: {error}") from error


class _Doctor:
    """One rank's part."""

    def __init__(self, seconds: float, store: dist.Store, rank: int, ranks: int, path: Path | None) -> None:
        self._store, self._rank, self._turn, self._path = store, rank, 0, path
        self._among = list(range(ranks))  # who gathers
        self._seconds = seconds

    def run(self) -> int:
        first: dict[str, int] = {}
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()  # a network namespace is a host
        for rank, host in enumerate(self._gather(f"{boot} {Path('/proc/self/ns/net').stat().st_ino}")):
            first.setdefault(host, rank)
        everybody, self._among = self._among, sorted(first.values())
        status = self._examine(len(everybody)) if self._rank in self._among else 0
        self._store.set(f"end/{self._rank}", "")
        for rank in everybody if self._rank == 0 else ():  # its process may have the store
            self._store.get(f"end/{rank}")
        return status

    def _examine(self, ranks: int) -> int:
        """The part of a host's first rank."""
        try:
            listener = Listener(self._rank, _port(), _ACCEPT_S)
            mine = _about(self._rank, listener)
        except (OSError, ValueError) as error:
            mine = {"why": f"# rank {self._rank} ({socket.gethostname()}): {error}"}
        hosts = dict(zip(self._among, self._gather(mine), strict=True))
        self._print(heading("torch_lowcomm doctor", ranks=ranks, hosts=len(hosts)))
        if wrong := [about["why"] for about in hosts.values() if "why" in about]:
            self._print("\n".join(wrong))
            return 1
        self._print("#" + _ROW.format(*_NAMES)[1:])
        ways = [(a, b, by, to) for a in hosts for b in hosts if a != b for by, to in hosts[b]["addresses"]]
        rows: list[Row] = []
        for a, b, by, to in ways:  # the IPv4 address of an interface before its IPv6 ones
            if not any(row["reached"] and (row["from"], row["to"], row["by"]) == (a, b, by) for row in rows):
                rows.append(self._dial(listener, a, b, by, to))
        said = advice(rows, hosts) if len(hosts) > 1 else ["all ranks are on one host: it dials nothing"]
        if self._path and self._rank == 0:
            found = {"versions": versions(), "machine": machine(), "ranks": ranks, "hosts": len(hosts), "rows": rows}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(found, indent=1) + "\n")
        for sentence in said or ["nothing has to be set"]:
            self._print(f"# {sentence}")
        ranked = sorted((row for row in rows if row["both"]), key=lambda row: min(row["both"]))
        if best := {(row["from"], row["to"]): min(row["both"]) for row in ranked}:
            slowest = min(best.values())
            seconds = [100 * bits / 32 * 8 / slowest for bits in (32, 4.25)]
            self._print(
                f"# at {slowest:.3g} Mbit/s an all_reduce of 100 MB of float32 between two hosts takes {seconds[0]:.2g} s, in "
                f"4 bits {seconds[1]:.2g} s; `plan` says what suits a model"
            )
        return int(any("no address" in sentence for sentence in said))

    def _dial(self, listener: Listener, a: int, b: int, by: str, address: tuple[str, int, str]) -> Row:
        """Rank a dials an address of rank b; the others wait."""
        mine: Row = {}
        try:
            if self._rank in (a, b):
                leads = self._rank == a
                with Connection.to(address, a, b, _PATIENCE_S) if leads else listener.accept(a) as made:
                    made.patience(_QUEUE_S)
                    mine = {"reached": True}
                    mine |= measure(made, self._seconds, leads=leads)
        except (OSError, RuntimeError) as error:
            mine["why"] = str(error.__cause__ or error)
        found = dict(zip(self._among, self._gather(mine), strict=True))
        reached = "reached" in found[a]
        why = (found[b].get("why") if reached else "") or found[a].get("why", "")
        rates, both = ([] if why else [found[end][how] for end in (b, a)] for how in ("alone", "both"))
        rtt_us = statistics.median(found[a]["rtt_us"]) if rates else 0.0
        cells = [f"{x:.1f}" for x in (rtt_us, *rates, *both)] if rates else [""] * 5
        self._print(f"{_ROW.format(a, b, by, address[0], *cells)}  {why}".rstrip())
        return {"from": a, "to": b, "by": by, "reached": reached, "rates": rates, "both": both, "rtt_us": rtt_us}

    def _gather(self, mine: Any) -> list[Any]:
        """Returns the values of all that gather, as JSON has them."""
        self._turn += 1
        self._store.set(f"{self._turn}/{self._rank}", json.dumps(mine))
        return [json.loads(value) for value in self._store.multi_get([f"{self._turn}/{rank}" for rank in self._among])]

    def _print(self, line: str) -> None:
        if self._rank == 0:
            print(line, flush=True)


def _port() -> int:
    """Returns the port that this process listens on; 0: any."""
    listen = os.environ.get("LOWCOMM_LISTEN") or ":0"
    port = listen.rpartition(":")[2]
    if ":" not in listen or not port.isdecimal():
        raise ValueError(f"LOWCOMM_LISTEN: expected host:port or :port, got {listen!r}")
    return int(port) + int(os.environ.get("LOCAL_RANK", 0)) if int(port) else 0


def _about(rank: int, listener: Listener) -> dict[str, Any]:
    """Returns the rank's name, the interface that it is told to use, and its addresses: those that a group would have."""
    addresses = [(name, (ip, listener.port, listener.token)) for name, ip in interfaces() if not ip.startswith("127.")]
    if advertised := os.environ.get("LOWCOMM_ADVERTISE"):
        host, port = host_and_port(advertised, "LOWCOMM_ADVERTISE: expected host:port")
        outside = port + int(os.environ.get("LOCAL_RANK", 0))
        addresses = [("advertised", (host.strip("[]"), outside, listener.token))]
    idle = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")  # what a pause does to TCP's window: docs/transport.md
    return {
        "name": f"rank {rank} ({socket.gethostname()})",
        "chosen": chosen_interface(),
        "addresses": addresses,
        "restarts": idle.exists() and idle.read_text().strip() == "1",
    }


def advice(rows: list[Row], hosts: dict[int, dict[str, Any]]) -> list[str]:
    """Returns what to set, a sentence each, for hosts by their ranks, with "name" and "chosen", their interface by choice."""
    said = []
    if restarting := [about["name"] for about in hosts.values() if about["restarts"]]:
        said.append(
            f"{', '.join(restarting)}: sysctl -w net.ipv4.tcp_slow_start_after_idle=0 there saves some ms of a message after a "
            "pause of a second and more"
        )
    ways = {(row["from"], row["to"]) for row in rows if row["reached"]}
    for rank, about in hosts.items():
        for other in hosts:
            if rank < other and not ways & {(rank, other), (other, rank)}:
                said.append(
                    f"{about['name']} and {hosts[other]['name']} reach each other at no address: open a port for each process "
                    "(LOWCOMM_LISTEN=:29600), or set LOWCOMM_RELAY=HOST:29700 on both, where "
                    "`python -m torch_lowcomm relay --listen :29700` runs on a HOST that both reach"
                )
        callers, called = {a for a, b in ways if b == rank}, {b for a, b in ways if a == rank}
        if called and not callers:
            said.append(
                f"{about['name']}: no rank reaches it; LOWCOMM_DIAL_ONLY=1 there saves seconds of a group's start"
            )
        here = [row for row in rows if row["to"] == rank and row["reached"]]
        rates: dict[str, list[float]] = {}
        for row in here:
            rates.setdefault(row["by"], []).extend(min(row["rates"]) for _ in row["rates"][:1])
        for_all = {by: min(found) for by, found in rates.items() if len(found) == len(callers)}
        now = about["chosen"]
        if now and "advertised" not in rates and callers - {row["from"] for row in here if row["by"] == now}:
            said.append(
                f"{about['name']}: {now}, which LOWCOMM_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names, does not answer all"
            )
        best = max(for_all, key=for_all.__getitem__, default="")
        if now in for_all and for_all[best] > 1.2 * for_all[now]:  # where none is named, groups find it
            said.append(
                f"{about['name']}: set LOWCOMM_SOCKET_IFNAME={best} there: {for_all[best]:.0f} Mbit/s, {now}, which it names "
                f"now, {for_all[now]:.0f}"
            )
    return said
