"""One rank of a bench: makes the groups, runs them in turn within every iteration, checks, and combines the ranks."""

import dataclasses
import hashlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm._all_gather_json import all_gather_json
from torch_lowcomm._C import Codec, Options
from torch_lowcomm.cli.bench.expected import codec_error, count_wrong
from torch_lowcomm.cli.bench.launch import TIMEOUT
from torch_lowcomm.cli.bench.ops import DTYPES, OPERATIONS, Case, Operation
from torch_lowcomm.groups import backend_of

_PAYLOAD_OF_A_FRAME = 1448 / 1514  # TCP payload of an Ethernet frame with an MTU of 1500 and TCP's time stamps


@dataclasses.dataclass(frozen=True)
class Plan:
    """The measurement, the same on every rank; a policy of None is the environment's."""

    name: str
    sizes: list[int]  # bytes
    dtype: str
    redop: str
    root: int
    iterations: int
    warm_up: int
    policy: str | None
    peer: str | None
    rate: float | None  # of the link, bits a second
    json: Path | None  # file that rank 0 writes

    @property
    def op(self) -> Operation:
        """The op with this name."""
        return OPERATIONS[self.name]


def count_of(plan: Plan, size: int, ranks: int) -> int:
    """Returns the number of elements of a rank's part of `size` bytes, rounded down; a part has one at least."""
    parts = 1 if plan.op.whole else ranks
    item = DTYPES[plan.dtype].itemsize
    if size < parts * item:
        raise ValueError(
            f"expected sizes of at least {parts * item} bytes, an element of {plan.dtype} for each of {parts} parts, got {size}"
        )
    return size // item // parts


class Bench:
    """The groups of one rank. Collective: every rank makes one and iterates over `rows`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        if self.ranks < 2:
            raise ValueError(f"expected at least 2 ranks, got {self.ranks}")
        for size in plan.sizes:
            count_of(plan, size, self.ranks)
        if plan.op.rooted and plan.root >= self.ranks:
            raise ValueError(f"expected -r below {self.ranks}, the number of ranks, got {plan.root}")
        # Small sizes are coded too, so that the bench can show from which size coding pays.
        options = Options(plan.policy, min_bytes=0)
        self.groups = {"lowcomm": dist.new_group(backend="lowcomm", pg_options=options, timeout=TIMEOUT)}
        if plan.peer:
            self.groups[plan.peer] = dist.new_group(backend=plan.peer, timeout=TIMEOUT)
        self.policy = backend_of(self.groups["lowcomm"]).policy
        named = dict(entry.split("=", 1) for entry in self.policy.split("; ") if entry)
        self.codec = Codec(named[plan.op.key]) if plan.op.key in named else None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Measures; yields a row for each size, equal on all ranks."""
        plan = self.plan
        for size in plan.sizes:
            count = count_of(plan, size, self.ranks)
            case = Case(plan.op, self.rank, self.ranks, count, DTYPES[plan.dtype], plan.redop, plan.root)
            size = count * (1 if plan.op.whole else self.ranks) * DTYPES[plan.dtype].itemsize
            yield {
                "size_bytes": size,
                "count": count,
                "type": plan.dtype,
                "redop": plan.redop if plan.op.reduces else "none",
                "root": plan.root if plan.op.rooted else -1,
                **self._measure(case, size),
            }

    def _measure(self, case: Case, size: int) -> dict[str, Any]:
        seconds: dict[str, list[float]] = {name: [] for name in self.groups}
        before = self._counters()
        for iteration in range(-self.plan.warm_up, self.plan.iterations):
            if iteration == 0:
                before = self._counters()
            for name, group in self.groups.items():
                case.prepare()
                dist.barrier()
                start = time.perf_counter()
                case.call(group)
                if iteration >= 0:
                    seconds[name].append(time.perf_counter() - start)
        after = self._counters()
        self._expect_coded(after)
        mine = {
            "seconds": seconds,
            "counters": {key: after[key] - before[key] for key in after if key != "because"},
            "checks": {name: self._check(case, name) for name in self.groups},
        }
        return self._summary(case, size, all_gather_json(mine))

    def _counters(self) -> dict[str, Any]:
        """Returns the counts of the measured group for the op so far, on this rank."""
        of = backend_of(self.groups["lowcomm"]).stats()
        total: dict[str, Any] = {"calls": 0, "exact": 0, "raw": 0, "wire": 0, "encode": 0.0, "decode": 0.0}
        because: dict[str, int] = {}
        for name in self.plan.op.sent:
            if name in of:
                total["calls"] += of[name]["calls"]
                total["exact"] += of[name]["exact_calls"]
                total["raw"] += of[name]["raw_bytes"] - of[name]["inner_bytes"]
                total["wire"] += of[name]["wire_bytes"] or 0
                because |= of[name]["exact_because"]
        for name in {*self.plan.op.sent, *(["recv"] if self.plan.op.name == "sendrecv" else [])} & set(of):
            total["encode"] += of[name]["encode_s"]
            total["decode"] += of[name]["decode_s"]
        return total | {"because": because}

    def _expect_coded(self, counters: dict[str, Any]) -> None:
        """Raises ValueError if a codec was asked for and calls stayed exact."""
        if self.codec is not None and counters["exact"]:
            why = ", ".join(counters["because"]) or "the op is not coded"
            reduction = f" ({self.plan.redop})" if self.plan.op.reduces else ""
            raise ValueError(
                f"expected {self.plan.op.name} of {self.plan.dtype}{reduction} to be coded by "
                f"{self.codec.spec}, got {counters['exact']} exact calls of {counters['calls']}: {why}"
            )

    def _check(self, case: Case, name: str) -> dict[str, Any]:
        """Returns this rank's wrong elements, error and digest in one more call."""
        case.prepare()
        case.call(self.groups[name])
        exact = case.expected()
        coded = None
        if self.codec and name == "lowcomm":  # its error on a short input may be 0 by chance
            coded = codec_error(self.codec, case.input_of(self.rank, least=4096))
        roundings = self.ranks if coded is not None or case.op.reduces else 0
        return {
            "wrong": count_wrong(case.result, exact, roundings=roundings, coded=coded),
            "error": float((case.result.double() - exact.double()).square().sum()),
            "norm": float(exact.double().square().sum()),
            "digest": hashlib.blake2b(case.result.view(torch.uint8).numpy()).hexdigest(),
        }

    def _summary(self, case: Case, size: int, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        forms = {name: self._of_group(name, case, size, everyone) for name in self.groups}
        result = forms.pop("lowcomm")
        calls = self.plan.iterations
        busiest = max((rank["counters"] for rank in everyone), key=lambda counters: counters["wire"])
        wire = busiest["wire"] / calls
        result |= {
            "coded": self.codec is not None,
            "wire_bytes": wire or None,
            "ratio": busiest["raw"] / busiest["wire"] if busiest["wire"] else None,
            **{
                f"{step}_us": max(rank["counters"][step] for rank in everyone) / calls * 1e6 if wire else None
                for step in ("encode", "decode")
            },
            "peer": None,
            "times_peer": None,
        }
        for name, peer in forms.items():
            result["peer"] = {"backend": name, **peer}
            result["times_peer"] = peer["time_us"] / result["time_us"]
        return result

    def _of_group(self, name: str, case: Case, size: int, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the figures of one group; an iteration lasts as long as its slowest rank."""
        times = [max(took) * 1e6 for took in zip(*(rank["seconds"][name] for rank in everyone), strict=True)]
        median = statistics.median(times)
        quarters = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [median] * 3
        checks = [rank["checks"][name] for rank in everyone]
        differ = sum(check["digest"] != checks[0]["digest"] for check in checks) if case.op.equal else 0
        norm = sum(check["norm"] for check in checks)
        # The payload in bytes that the busiest rank must send, however the op is done.
        codec = self.codec if name == "lowcomm" else None
        part = -(-case.count // self.ranks) if case.op.name == "all_reduce" else case.count
        needed = case.op.pieces(self.ranks) * (
            codec.encoded_bytes(part, case.dtype) if codec else part * case.dtype.itemsize
        )
        ideal = needed * 8 / (self.plan.rate * _PAYLOAD_OF_A_FRAME) * 1e6 if self.plan.rate else None
        return {
            "time_us": median,
            "min_us": min(times),
            "spread": (quarters[2] - quarters[0]) / median,
            "times_us": times,
            "algbw_gb_s": size / median / 1e3,
            "busbw_gb_s": size / median / 1e3 * case.op.bus(self.ranks),
            "wrong": sum(check["wrong"] for check in checks) + differ,
            "ranks_differ": differ,
            "relative_error": (sum(check["error"] for check in checks) / norm) ** 0.5 if norm else None,
            "needed_bytes": needed,
            "ideal_us": ideal,
            "share_of_ideal": ideal / median if ideal else None,
        }
