"""The accounts of all ranks of a job as a text that a person reads at a glance."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_lowcomm._table import aligned, spans
from torch_lowcomm.summary import Summary

_MOST = 10  # rows of links: those that need a look come first
_RANKS = "rank|host|now|for s|waits for|sent MB|exact MB|times fewer|coding s|waiting s|error"
_LINKS = "ranks|Mbit/s >|Mbit/s <|round trip ms|sent again|cuts|path|cipher"
_COMPUTING = "computing"
Pair = tuple[int, int]


class View:
    """Makes texts of accounts; it remembers earlier ones, for the rates of links between two texts."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[Pair, int]] = (0.0, {})  # when, and bytes that ranks had sent to others

    def text(self, accounts: Sequence[dict[str, Any] | str], *, all_links: bool = False) -> str:
        """Returns the state of a job, of an account for each rank, or the text why it gave none."""
        job = _Job(accounts)
        rates = self._rates(job.sent)
        there = sum(not isinstance(of, str) for of in accounts)
        parts = {
            f"lowcomm at {time.strftime('%H:%M:%S')}: {there} of {len(accounts)} ranks answer": job.ranks(),
            "WHO WAITS FOR WHOM": job.waits(),
            "LINKS": job.lines_of_links(rates, None if all_links else _MOST),
            "PROGRESS": job.progress(),
        }
        return "\n\n".join("\n".join([title, *lines]) for title, lines in parts.items() if lines)

    def _rates(self, sent: dict[Pair, int]) -> dict[Pair, float]:
        """Bits a second that a rank has sent to another one since the last text."""
        (then, before), now = self._before, time.monotonic()
        self._before = now, sent
        return {pair: 8 * (sent[pair] - before[pair]) / (now - then) for pair in sent if pair in before}


class _Job:
    """What the accounts say together; ranks are those of the job where its accounts tell them, else `#k` of the group."""

    def __init__(self, accounts: Sequence[dict[str, Any] | str]) -> None:
        self._accounts = accounts
        self._there = {rank: of for rank, of in enumerate(accounts) if not isinstance(of, str)}
        self._ranks = {(name, group["rank"]): rank for rank, name, group in self._groups()}
        self.sent: dict[Pair, int] = {}  # bytes from a rank to another one
        links: dict[Pair, list[Mapping[str, Any]]] = {}
        for rank, name, group in self._groups():
            for peer, link in group["links"].items():
                other = self._ranks.get((name, int(peer)))
                if other is not None:
                    self.sent[rank, other] = self.sent.get((rank, other), 0) + link["sent_bytes"]
                    links.setdefault((min(rank, other), max(rank, other)), []).append(link)
        self._links = {pair: _joined(found) for pair, found in links.items()}

    def _groups(self) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        return ((rank, name, group) for rank, of in self._there.items() for name, group in of["groups"].items())

    def _name(self, group: str, rank: int | None) -> str:
        return "-" if rank is None else str(self._ranks.get((group, rank), f"#{rank} of {group}"))

    def _now(self, rank: int) -> tuple[str, str, str]:
        """What a rank does, for how long, and for whom it waits: the oldest op under way, else since the end of the last."""
        groups = self._there[rank]["groups"]
        ops = [(op, name) for name, group in groups.items() for op in group["ops"]]
        if ops:
            op, name = min(ops, key=lambda item: item[0]["queued_s"])
            awaited = op["wait"]["rank"] if op["wait"] else None
            more = f" +{len(ops) - 1}" if len(ops) > 1 else ""
            return f"{op['op']} {op['sequence']}{more}", f"{-op['queued_s']:.1f}", self._name(name, awaited)
        ended = [(group["idle_s"], group["last"]) for group in groups.values() if group["last"]]
        since, last = min(ended, default=(None, ""))
        return (_COMPUTING, "-", "-") if since is None else (f"{_COMPUTING} after {last}", f"{since:.1f}", "-")

    def ranks(self) -> list[str]:
        """A row for each rank."""
        rows = []
        for rank, of in enumerate(self._accounts):
            if isinstance(of, str):
                rows.append([str(rank), "-", "no answer", *["-"] * 8])
                continue
            found = Summary(of["ops"])
            sent, raw = found.wire_bytes, found.raw_bytes
            error = max((op["relative_error"] or 0.0 for op in found.ops.values()), default=0.0)
            figures = [f"{sent / 1e6:.1f}", f"{raw / 1e6:.1f}", f"{raw / sent:.1f}" if sent else "-"]
            figures += [f"{found.coding_s:.1f}", f"{found.wait_s:.1f}", f"{error:.2g}" if error else "-"]
            rows.append([str(rank), of["host"], *self._now(rank), *figures])
        silent = [f"rank {rank} does not answer: {of}" for rank, of in enumerate(self._accounts) if isinstance(of, str)]
        return [*aligned(_RANKS, rows), *silent]

    def waits(self) -> list[str]:
        """A line for each op and each rank that others wait for in it."""
        waiting: dict[tuple[str, ...], dict[int, float]] = {}
        for rank, name, group in self._groups():
            for op in group["ops"]:
                if op["wait"]:
                    key = (name, f"{op['op']} {op['sequence']}", self._name(name, op["wait"]["rank"]))
                    waiting.setdefault(key, {})[rank] = -op["queued_s"]
        lines = []
        for (_, op, awaited), ranks in sorted(waiting.items(), key=lambda item: -len(item[1])):
            who = f"ranks {spans(ranks)} wait" if len(ranks) > 1 else f"rank {spans(ranks)} waits"
            does = ""
            if awaited.isdigit() and int(awaited) in self._there:
                now, since, _ = self._now(int(awaited))
                does = f", which is {'' if now.startswith(_COMPUTING) else 'in '}{now} ({since} s)"
            lines.append(f"{op}: {who} {max(ranks.values()):.1f} s for rank {awaited}{does}")
        return lines

    def lines_of_links(self, rates: Mapping[Pair, float], most: int | None) -> list[str]:
        """A row for each pair of ranks; those that are cut, lose segments or go through a relay come first."""

        def need_of_a_look(pair: Pair) -> tuple[Any, ...]:
            of = self._links[pair]
            return of["connected"] and of["path"] == "direct", -of["cuts"], -of["retransmitted"], pair

        rows = []
        for a, b in sorted(self._links, key=need_of_a_look)[:most]:
            of = self._links[a, b]
            there, back = (f"{rates[pair] / 1e6:.1f}" if pair in rates else "-" for pair in ((a, b), (b, a)))
            trip, path = (f"{of['round_trip_s'] * 1e3:.2f}", of["path"]) if of["connected"] else ("-", "not connected")
            figures = [there, back, trip, str(of["retransmitted"]), str(of["cuts"])]
            rows.append([f"{a} - {b}", *figures, path, of["cipher"] or "-"])
        hidden = len(self._links) - len(rows)
        return (aligned(_LINKS, rows) if rows else []) + ([f"{hidden} more links (top --all)"] if hidden else [])

    def progress(self) -> list[str]:
        """What methods note; equal notes of several ranks are one line."""
        lines: dict[str, list[int]] = {}
        for rank, of in self._there.items():
            for what, figures in of["notes"].items():
                values = {name: f"{of:.3g}" if isinstance(of, float) else of for name, of in figures.items()}
                text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
                lines.setdefault(f"{what}: {text}", []).append(rank)
        return [f"{text} (rank{'s' if len(ranks) > 1 else ''} {spans(ranks)})" for text, ranks in lines.items()]


def _joined(links: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Both ends of a pair's connections, in all groups, as one link."""
    sums = {name: sum(of[name] for of in links) for name in ("cuts", "retransmitted")}
    texts = {name: ", ".join(sorted({of[name] for of in links} - {""})) for name in ("path", "cipher")}
    least = min((of["round_trip_s"] for of in links if of["round_trip_s"] is not None), default=None)
    return {"connected": all(of["connected"] for of in links), "round_trip_s": least, **sums, **texts}
