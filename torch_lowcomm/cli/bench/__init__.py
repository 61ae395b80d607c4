"""Time collectives as nccl-tests does, with bytes, error and correctness.

torchrun … -m torch_lowcomm bench all_reduce -b 1M -e 64M -f 4 --codec sym4:bucket=1024 --peer gloo --rate 100M
python -m torch_lowcomm bench all_gather --codec minmax8            # starts two ranks on this machine
"""

import argparse

from torch_lowcomm.cli.bench import collectives, launch
from torch_lowcomm.cli.bench.ops import OPERATIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments: a subcommand for every op."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    ops = parser.add_subparsers(dest="op", required=True, metavar="OP", help=", ".join(OPERATIONS))
    for op in OPERATIONS.values():
        sub = ops.add_parser(
            op.name,
            description=f"Time {op.name}; a size is that {op.about}.",
            epilog=collectives.COLUMNS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        collectives.add_arguments(sub, op)
        sub.add_argument(
            "--ranks", type=int, metavar="N", help="ranks to start on this machine where no launcher did (2)"
        )


def main(arguments: argparse.Namespace) -> int:
    """Checks the arguments, then runs as a rank, or starts ranks on this machine. Returns 0; 1 if a result was wrong or a
    rank failed; 2 if an argument is wrong, which one line on stderr names.
    """
    launched = launch.launched()
    try:
        plan = collectives.prepare(arguments)
        if arguments.ranks is not None and (launched or arguments.ranks < 2):
            here = "none where a launcher has started the ranks" if launched else "at least 2"
            raise ValueError(f"--ranks: expected {here}, got {arguments.ranks}")
    except ValueError as error:
        launch.say(str(error))
        return 2
    if launched:
        launch.run_rank(collectives.run, plan)
    return launch.local_ranks(collectives.run, plan, ranks=arguments.ranks or 2)
