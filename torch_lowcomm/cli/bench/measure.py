"""One rank of a bench: makes the groups, runs them in turn within every iteration, checks, and combines the ranks."""

import hashlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm._all_gather_json import all_gather_json
from torch_lowcomm._C import Codec, Options
from torch_lowcomm.cli.bench import report
from torch_lowcomm.cli.bench.expected import count_wrong
from torch_lowcomm.cli.bench.launch import TIMEOUT
from torch_lowcomm.cli.bench.ops import DTYPES, OPERATIONS, Case
from torch_lowcomm.cli.bench.plan import Plan
from torch_lowcomm.cli.machine import heading
from torch_lowcomm.groups import backend_of

_PAYLOAD_OF_A_FRAME = 1448 / 1514  # TCP payload of an Ethernet frame with an MTU of 1500 and TCP's time stamps


def run(plan: Plan) -> int:
    """Runs one rank; rank 0 prints and writes. Returns the exit status, equal on all ranks."""
    bench = Bench(plan)
    options = {
        "ranks": bench.ranks,
        "policy": bench.backend.policy,
        "iters": plan.iters,
        "warmup_iters": plan.warmup_iters,
        "peer": plan.peer,
        "rate_bit_s": plan.rate,
    }

    def say(*lines: str) -> None:
        if bench.rank == 0:
            print(*lines, sep="\n", flush=True)

    say(heading(f"torch_lowcomm bench {plan.op}", **options), report.columns())
    rows = []
    for row in bench.rows():
        rows.append(row)
        say(report.line(row))
    say(report.closing(rows))
    wrong = report.wrong_of(rows)
    if bench.rank == 0 and plan.json:
        report.write_json(plan.json, op=plan.op, options=options, rows=rows, wrong=wrong)
    return 1 if wrong else 0


class Bench:
    """The groups of one rank. Collective: every rank makes one and iterates over `rows`."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.op = plan, OPERATIONS[plan.op]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        if self.ranks < 2:
            raise ValueError(f"expected at least 2 ranks, got {self.ranks}")
        if plan.root >= self.ranks:
            raise ValueError(f"expected -r below {self.ranks}, the number of ranks, got {plan.root}")
        # Small sizes are coded too, so that the bench can show from which size coding pays.
        options = Options(plan.policy, min_bytes=0)
        self.groups = {"lowcomm": dist.new_group(backend="lowcomm", pg_options=options, timeout=TIMEOUT)}
        if plan.peer:
            self.groups[plan.peer] = dist.new_group(backend=plan.peer, timeout=TIMEOUT)
        self.backend = backend_of(self.groups["lowcomm"])
        named = dict(entry.split("=", 1) for entry in self.backend.policy.split("; ") if entry)
        self.codec = Codec(named[self.op.key]) if self.op.key in named else None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Measures; yields a row for each size, equal on all ranks."""
        plan = self.plan
        for size in plan.sizes:
            case = Case(self.op, self.rank, self.ranks, size, DTYPES[plan.datatype], plan.redop, plan.root)
            yield self._row(case, all_gather_json(self._measure(case)))

    def _measure(self, case: Case) -> dict[str, Any]:
        """Returns the seconds, counters and checks of this rank."""
        seconds: dict[str, list[float]] = {name: [] for name in self.groups}
        for iteration in range(-self.plan.warmup_iters, self.plan.iters):
            if iteration == 0:
                self.backend.reset_stats()
            for name, group in self.groups.items():
                case.prepare()
                dist.barrier()
                start = time.perf_counter()
                case.call(group)
                if iteration >= 0:
                    seconds[name].append(time.perf_counter() - start)
        counters = self._counters()
        return {"seconds": seconds, "counters": counters, "checks": {name: self._check(case, name) for name in seconds}}

    def _counters(self) -> dict[str, Any]:
        """Returns the sums of the timed calls; ValueError if a codec was asked for and calls stayed exact."""
        found = self.backend.stats().values()
        names = ("calls", "exact_calls", "raw_bytes", "wire_bytes", "encode_s", "decode_s")
        total = {name: sum(of[name] for of in found) for name in names}
        if self.codec is not None and total["exact_calls"]:
            why = ", ".join(why for of in found for why in of["exact_because"]) or "the op is not coded"
            reduction = f" ({self.plan.redop})" if self.op.reduces else ""
            raise ValueError(
                f"expected {self.plan.op} of {self.plan.datatype}{reduction} to be coded by {self.codec.spec}, "
                f"got {total['exact_calls']} exact calls of {total['calls']}: {why}"
            )
        return total

    def _check(self, case: Case, name: str) -> dict[str, Any]:
        """Returns this rank's wrong elements, error and digest in one more call."""
        case.prepare()
        case.call(self.groups[name])
        exact = case.expected()
        codec = self.codec if name == "lowcomm" else None
        roundings = self.ranks if codec or self.op.reduces else 0
        return {
            "wrong": count_wrong(case.result, exact, roundings=roundings, codec=codec),
            "error": float((case.result.double() - exact.double()).square().sum()),
            "norm": float(exact.double().square().sum()),
            "digest": hashlib.blake2b(case.result.view(torch.uint8).numpy()).hexdigest(),
        }

    def _row(self, case: Case, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        counters = [rank["counters"] for rank in everyone]
        busiest = max(counters, key=lambda of: of["wire_bytes"])
        row = {
            "size_bytes": case.elements * case.dtype.itemsize,
            "count": case.count,
            "type": self.plan.datatype,
            "redop": case.redop if self.op.reduces else "none",
            "root": case.root if self.op.rooted else -1,
            **self._of_group("lowcomm", case, everyone),
            "coded": self.codec is not None,
            "wire_bytes": busiest["wire_bytes"] / self.plan.iters,
            "ratio": busiest["raw_bytes"] / busiest["wire_bytes"],
            "encode_us": max(of["encode_s"] for of in counters) / self.plan.iters * 1e6,
            "decode_us": max(of["decode_s"] for of in counters) / self.plan.iters * 1e6,
            "peer": None,
            "times_peer": None,
        }
        if self.plan.peer:
            row["peer"] = {"backend": self.plan.peer, **self._of_group(self.plan.peer, case, everyone)}
            row["times_peer"] = row["peer"]["time_us"] / row["time_us"]
        return row

    def _of_group(self, name: str, case: Case, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the figures of one group; an iteration lasts as long as its slowest rank."""
        times = [max(took) * 1e6 for took in zip(*(rank["seconds"][name] for rank in everyone), strict=True)]
        median = statistics.median(times)
        quarters = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        checks = [rank["checks"][name] for rank in everyone]
        differ = sum(check["digest"] != checks[0]["digest"] for check in checks) if self.op.equal else 0
        norm = sum(check["norm"] for check in checks)
        messages, elements = self.op.sends(case.elements, self.ranks)
        codec = self.codec if name == "lowcomm" else None
        needed = messages * (codec.encoded_bytes(elements, case.dtype) if codec else elements * case.dtype.itemsize)
        ideal = needed * 8 / (self.plan.rate * _PAYLOAD_OF_A_FRAME) * 1e6 if self.plan.rate else None
        algbw = case.elements * case.dtype.itemsize / median / 1e3
        return {
            "time_us": median,
            "min_us": min(times),
            "spread": (quarters[2] - quarters[0]) / median,
            "times_us": times,
            "algbw_gb_s": algbw,
            "busbw_gb_s": algbw * messages * elements / case.elements,
            "wrong": sum(check["wrong"] for check in checks) + differ,
            "ranks_differ": differ,
            "relative_error": (sum(check["error"] for check in checks) / norm) ** 0.5 if norm else None,
            "needed_bytes": needed,
            "ideal_us": ideal,
            "share_of_ideal": ideal / median if ideal else None,
        }
