"""The bench of one op: its arguments, and what a rank does with them."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

import torch.distributed as dist

from torch_lowcomm._C import Codec, Options
from torch_lowcomm.cli.bench import plot, report
from torch_lowcomm.cli.bench.measure import Bench, Plan
from torch_lowcomm.cli.bench.ops import DTYPES, OPERATIONS, REDOPS, Operation
from torch_lowcomm.cli.bench.sizes import bit_rate, byte_size, sweep

COLUMNS = """\
columns (N/A: torch has no such form of the op, it was not asked for, or it is not counted)
  size, count     bytes as stated above; elements of one rank's part of it
  time            median over the iterations, us; one lasts from a barrier to the end of its slowest rank
  algbw, busbw    size / time; that, times what the busiest rank must send of size: all_reduce 2(W-1)/W, all_gather,
                  reduce_scatter and all_to_all (W-1)/W, others 1. GB/s (10^9) of exact bytes, coded or not
  #wrong          elements of all ranks that are not what they must be, and ranks whose bytes differ from rank 0's
                  where all must end equal. Exact: the same bits for what is only moved, integers, min, max and two
                  ranks, else within (W-1)u sum|x|. Coded: within the codec's stated error, or, where it states none of
                  an element (gauss, rotate, topk, sign1, range=l2), within that of a round trip, a quarter on top, by
                  norm over 4096 elements
  min, spread     the fastest iteration, us; distance of the quartiles / median
  wire, ratio     bytes that the busiest rank sent in a call, frame headers included; what it would have sent without a
                  codec / that. N/A where the inner backend carried it, which does not count
  rel.err         norm of the difference from the exact result / norm of that
  encode, decode  us a call of the slowest rank, part of it while the wire is busy; without a codec copies and checksums
  ideal           share of the ideal time of a link of --rate in the time: payload bytes that the busiest rank must
                  send, coded, x 8 / (rate x 1448/1514), TCP's payload of an Ethernet frame
  x peer          the peer's time / this time: above 1 is faster
min ... x peer are of the first form measured. Exit status 1 when anything is wrong, the peer's results too."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What every rank gets: the plan, and where rank 0 writes to."""

    plan: Plan
    json: Path | None
    plot: Path | None


def add_arguments(parser: argparse.ArgumentParser, op: Operation) -> None:
    """Declare the arguments of one op: nccl-tests' names first."""
    add = parser.add_argument
    add("-b", "--minbytes", default="32M", metavar="SIZE", help="smallest size, bytes or K, M, G of 1024 (32M)")
    add("-e", "--maxbytes", default="32M", metavar="SIZE", help="largest size (32M)")
    add("-i", "--stepbytes", default="1M", metavar="SIZE", help="from one size to the next, where there is no -f (1M)")
    add("-f", "--stepfactor", type=int, metavar="N", help="from one size to the next, a factor instead")
    add("-n", "--iters", type=int, default=20, metavar="N", help="timed calls of every size (20)")
    add("-w", "--warmup_iters", type=int, default=2, metavar="N", help="untimed calls before them (2)")
    add("-d", "--datatype", default="float", metavar="TYPE", help=f"{', '.join(DTYPES)} (float)")
    parser.set_defaults(redop="sum", root=0)
    if op.reduces:
        add("-o", "--op", dest="redop", metavar="OP", help=f"reduction: {', '.join(REDOPS)} (sum)")
    if op.rooted:
        add("-r", "--root", type=int, metavar="RANK", help="that broadcasts (0)")
    add("-c", "--check", type=int, default=1, metavar="N", help="checked calls of every size, 0 for none (1)")
    add("--codec", metavar="CODEC", help="of this op, such as sym4:bucket=1024; must then be what codes it")
    add("--policy", metavar="POLICY", help="of the measured group, as in Options (LOWCOMM_POLICY, else exact)")
    add("--peer", choices=["gloo"], help="backend measured beside it, in turn within every iteration")
    add("--rate", metavar="RATE", help="of the link where it is known, bit/s or k, M, G of 1000: fills in ideal")
    add("--json", type=Path, metavar="FILE", help="versions, machine, options and every time")
    add("--plot", type=Path, metavar="FILE", help="time and bus bandwidth against size; needs matplotlib")


def prepare(arguments: argparse.Namespace) -> Job:
    """The job that the arguments ask for.

    Raises:
        ValueError: An argument is wrong; it is named, with what was expected.
    """
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
        ("-c", arguments.check, 0),
    ):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    if arguments.codec is not None and arguments.policy is not None:
        raise ValueError("expected --codec or --policy, got both")
    if arguments.peer == "gloo" and os.environ.get("LOWCOMM_AS_GLOO") == "1":
        raise ValueError("--peer gloo: expected torch's gloo, got LOWCOMM_AS_GLOO=1, which puts lowcomm in its place")
    if arguments.plot:
        plot.expect_matplotlib()
    policy = arguments.policy
    if arguments.codec is not None:
        policy = f"{op.key}={Codec(arguments.codec).spec}"
    Options(policy)  # says what is wrong with a policy before ranks are started
    plan = Plan(
        name=op.name,
        sizes=sweep(
            *map(byte_size, (arguments.minbytes, arguments.maxbytes, arguments.stepbytes)), arguments.stepfactor
        ),
        dtype=arguments.datatype,
        redop=arguments.redop,
        root=arguments.root,
        iterations=arguments.iters,
        warm_up=arguments.warmup_iters,
        checks=arguments.check,
        policy=policy,
        peer=arguments.peer,
        rate=bit_rate(arguments.rate) if arguments.rate else None,
        timeout_s=arguments.timeout,
    )
    return Job(plan, arguments.json, arguments.plot)


def run(job: Job) -> int:
    """One rank, of which the first prints, writes and draws; the exit status, equal on all."""
    plan = job.plan
    bench = Bench(plan)
    first = dist.get_rank() == 0
    options = {
        "ranks": bench.ranks,
        "policy": bench.policy,
        "iters": plan.iterations,
        "warmup_iters": plan.warm_up,
        "check": plan.checks,
        "peer": plan.peer,
        "rate_bit_s": plan.rate,
    }
    title = f"torch_lowcomm bench {plan.op.name}"
    if first:
        print(report.heading(title, **options), report.columns(), sep="\n", flush=True)
    rows = []
    for row in bench.rows():
        rows.append(row)
        if first:
            print(report.line(row), flush=True)
    wrong = report.wrong_of(rows)
    if first:
        print(report.closing(rows), flush=True)
        if job.json:
            report.write_json(job.json, op=plan.op.name, options=options, rows=rows, wrong=wrong)
        if job.plot:
            plot.draw(rows, job.plot, title=f"{plan.op.name}, {bench.ranks} ranks, {bench.policy or 'exact'}")
    return 1 if wrong else 0
