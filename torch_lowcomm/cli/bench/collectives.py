"""The bench of one op: its arguments, and the run of one rank."""

import argparse
import os
import re
from pathlib import Path

import torch.distributed as dist

from torch_lowcomm._C import Codec, Options
from torch_lowcomm.cli.bench import report
from torch_lowcomm.cli.bench.measure import Bench, Plan
from torch_lowcomm.cli.bench.ops import DTYPES, OPERATIONS, REDOPS, Operation
from torch_lowcomm.cli.machine import heading

_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
COLUMNS = """\
columns (N/A: it was not asked for). all_reduce and broadcast are in place, the others out of place
  size            bytes, as stated above
  count           elements of one rank's part of size
  time            median over the iterations, us; one lasts from a barrier to the end of its slowest rank
  algbw           size / time, GB/s (10^9) of exact bytes, coded or not
  busbw           algbw x the share of size that the busiest rank must send: all_reduce 2(W-1)/W, all_gather,
                  reduce_scatter and all_to_all (W-1)/W, others 1
  #wrong          wrong elements of all ranks, and ranks whose bytes differ from rank 0's where all must end equal. Values
                  that are only moved must be the same; reduced floats may be off by W x eps x the largest one. A coded
                  result is wrong as a whole where its error is above 2 x that of a round trip of the codec + W x eps.
                  NaN is wrong
  min             the fastest iteration, us
  spread          distance of the quartiles / median
  wire            bytes that the busiest rank sent in a call, with frame headers
  ratio           bytes that it would have sent without a codec / wire
  rel.err         ||result - exact|| / ||exact||, where exact is computed in float64
  encode, decode  us a call on the slowest rank, partly while the wire is busy; without a codec copies and checksums
  ideal           share of the ideal time in the time. The ideal time of a link of --rate is: payload bytes that the
                  busiest rank must send, coded, x 8 / (rate x 1448/1514), TCP's payload of an Ethernet frame
  x peer          the peer's time / this time: above 1 is faster
The exit status is 1 if any result is wrong, the peer's too."""


def add_arguments(parser: argparse.ArgumentParser, op: Operation) -> None:
    """Declares the arguments of one op, nccl-tests' names first."""
    add = parser.add_argument
    add("-b", "--minbytes", default="32M", metavar="SIZE", help="smallest size, bytes or K, M, G of 1024 (32M)")
    add("-e", "--maxbytes", default="32M", metavar="SIZE", help="largest size (32M)")
    add("-f", "--stepfactor", type=int, default=2, metavar="N", help="factor from one size to the next (2)")
    add("-n", "--iters", type=int, default=20, metavar="N", help="timed calls of every size (20)")
    add("-w", "--warmup_iters", type=int, default=2, metavar="N", help="untimed calls before them (2)")
    add("-d", "--datatype", default="float", metavar="TYPE", help=f"{', '.join(DTYPES)} (float)")
    parser.set_defaults(redop="sum", root=0)
    if op.reduces:
        add("-o", "--op", dest="redop", metavar="OP", help=f"reduction: {', '.join(REDOPS)} (sum)")
    if op.rooted:
        add("-r", "--root", type=int, metavar="RANK", help="the rank that broadcasts (0)")
    add(
        "--codec",
        metavar="CODEC",
        help="codec of this op, such as sym4:bucket=1024 (LOWCOMM_POLICY's); an op that stays exact is an error",
    )
    add("--peer", choices=["gloo"], help="backend to compare with, in turn within every iteration")
    add("--rate", metavar="RATE", help="rate of the link, bit/s or k, M, G of 1000, for the column ideal")
    add("--json", type=Path, metavar="FILE", help="write versions, machine, options and every time to FILE")


def prepare(arguments: argparse.Namespace) -> Plan:
    """Makes the plan from the arguments; a wrong one is a ValueError with its name, what was expected, and the value."""
    op = OPERATIONS[arguments.op]
    for name, value, among in (("-o", arguments.redop, REDOPS), ("-d", arguments.datatype, DTYPES)):
        if value not in among:
            raise ValueError(f"{name}: expected one of {', '.join(among)}, got {value!r}")
    if op.reduces and arguments.redop == "avg" and not DTYPES[arguments.datatype].is_floating_point:
        raise ValueError(f"-o avg: expected a floating type, got {arguments.datatype}")
    for name, value, least in (
        ("-n", arguments.iters, 1),
        ("-w", arguments.warmup_iters, 0),
        ("-r", arguments.root, 0),
        ("-f", arguments.stepfactor, 2),
    ):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    if arguments.peer == "gloo" and os.environ.get("LOWCOMM_AS_GLOO") == "1":
        raise ValueError("--peer gloo: expected torch's gloo, got LOWCOMM_AS_GLOO=1, which puts lowcomm in its place")
    policy = None if arguments.codec is None else f"{op.key}={Codec(arguments.codec).spec}"
    Options(policy)  # raises for a wrong policy before ranks are started
    return Plan(
        name=op.name,
        sizes=sweep(byte_size(arguments.minbytes), byte_size(arguments.maxbytes), arguments.stepfactor),
        dtype=arguments.datatype,
        redop=arguments.redop,
        root=arguments.root,
        iterations=arguments.iters,
        warm_up=arguments.warmup_iters,
        policy=policy,
        peer=arguments.peer,
        rate=bit_rate(arguments.rate) if arguments.rate else None,
        json=arguments.json,
    )


def run(plan: Plan) -> int:
    """Runs one rank; rank 0 prints and writes. Returns the exit status, equal on all ranks."""
    bench = Bench(plan)
    first = dist.get_rank() == 0
    options = {
        "ranks": bench.ranks,
        "policy": bench.policy,
        "iters": plan.iterations,
        "warmup_iters": plan.warm_up,
        "peer": plan.peer,
        "rate_bit_s": plan.rate,
    }
    title = f"torch_lowcomm bench {plan.op.name}"
    if first:
        print(heading(title, **options), report.columns(), sep="\n", flush=True)
    rows = []
    for row in bench.rows():
        rows.append(row)
        if first:
            print(report.line(row), flush=True)
    wrong = report.wrong_of(rows)
    if first:
        print(report.closing(rows), flush=True)
        if plan.json:
            report.write_json(plan.json, op=plan.op.name, options=options, rows=rows, wrong=wrong)
    return 1 if wrong else 0


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


def sweep(least: int, most: int, factor: int) -> list[int]:
    """Returns the sizes (bytes) from `least` to `most`, each `factor` times the last."""
    if least > most:
        raise ValueError(f"expected -b no larger than -e, got {least} and {most} bytes")
    sizes = [least]
    while (size := sizes[-1] * factor) <= most:
        sizes.append(size)
    return sizes
