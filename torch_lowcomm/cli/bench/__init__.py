"""Time collectives as nccl-tests does, with bytes, error and correctness.

torchrun … -m torch_lowcomm bench all_reduce -b 1M -e 64M -f 4 --codec sym4:bucket=1024 --peer gloo --rate 100M
python -m torch_lowcomm bench all_gather --codec minmax8            # starts two ranks on this machine
"""

import argparse
import functools
import os
from pathlib import Path

from torch_lowcomm._C import Options
from torch_lowcomm.cli.bench import launch, measure
from torch_lowcomm.cli.bench.ops import DTYPES, OPERATIONS, REDOPS, Operation
from torch_lowcomm.cli.bench.plan import Plan, number

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
                  result of 4096 elements or more is wrong as a whole where its rel.err is above 2 x that of a round trip
                  of the codec + W x eps. NaN is wrong
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments: a subcommand for every op."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    ops = parser.add_subparsers(dest="op", required=True, metavar="OP", help=", ".join(OPERATIONS))
    for op in OPERATIONS.values():
        sub = ops.add_parser(
            op.name,
            description=f"Time {op.name}; a size is that {op.about}.",
            epilog=COLUMNS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_arguments_of(op, sub)


def _add_arguments_of(op: Operation, parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of one op, nccl-tests' names first."""
    add = parser.add_argument
    size, rate = functools.partial(number, thousand=1024), functools.partial(number, thousand=1000)
    add("-b", "--minbytes", type=size, default="32M", metavar="SIZE", help="smallest size, bytes or K, M, G (32M)")
    add("-e", "--maxbytes", type=size, default="32M", metavar="SIZE", help="largest size (32M)")
    add("-f", "--stepfactor", type=int, default=2, metavar="N", help="factor from one size to the next (2)")
    add("-n", "--iters", type=int, default=20, metavar="N", help="timed calls of every size (20)")
    add("-w", "--warmup_iters", type=int, default=2, metavar="N", help="untimed calls before them (2)")
    add("-d", "--datatype", choices=DTYPES, default="float", help="type of the elements (float)")
    parser.set_defaults(redop="sum", root=0)
    if op.reduces:
        add("-o", "--op", dest="redop", choices=REDOPS, help="reduction (sum)")
    if op.rooted:
        add("-r", "--root", type=int, metavar="RANK", help="the rank that broadcasts (0)")
    add(
        "--codec",
        help="codec of this op, such as sym4:bucket=1024 (LOWCOMM_POLICY's); exact calls are an error then",
    )
    add("--peer", choices=["gloo"], help="backend to compare with, in turn within every iteration")
    add("--rate", type=rate, help="rate of the link, bit/s or k, M, G of 1000, for the column ideal")
    add("--json", type=Path, metavar="FILE", help="write versions, machine, options and every time to FILE")
    add("--ranks", type=int, default=2, metavar="N", help="ranks to start here where no launcher did (2)")


def prepare(arguments: argparse.Namespace) -> Plan:
    """Makes the plan from the arguments; a wrong one is a ValueError with its name, what was expected, and the value."""
    for name, least in (("stepfactor", 2), ("iters", 1), ("warmup_iters", 0), ("root", 0), ("ranks", 2)):
        if vars(arguments)[name] < least:
            raise ValueError(f"--{name}: expected at least {least}, got {vars(arguments)[name]}")
    if arguments.minbytes > arguments.maxbytes:
        raise ValueError(f"expected -b no larger than -e, got {arguments.minbytes} and {arguments.maxbytes} bytes")
    if arguments.redop == "avg" and not DTYPES[arguments.datatype].is_floating_point:
        raise ValueError(f"-o avg: expected a floating type, got {arguments.datatype}")
    if arguments.peer == "gloo" and os.environ.get("LOWCOMM_AS_GLOO") == "1":
        raise ValueError("--peer gloo: expected torch's gloo, got LOWCOMM_AS_GLOO=1, which puts lowcomm in its place")
    plan = Plan.of(arguments)
    Options(plan.policy)  # raises for a wrong codec before ranks are started
    return plan


def main(arguments: argparse.Namespace) -> int:
    """Checks the arguments, then runs as a rank, or starts ranks on this machine. Returns 0; 1 if a result was wrong or a
    rank failed; 2 if an argument is wrong.
    """
    try:
        plan = prepare(arguments)
    except ValueError as error:
        launch.say(str(error))
        return 2
    if launch.launched():
        launch.run_rank(measure.run, plan)
    return launch.local_ranks(measure.run, plan, ranks=arguments.ranks)
