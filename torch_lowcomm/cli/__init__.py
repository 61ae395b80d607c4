"""The command line. Each command has a module with `add_arguments(parser)` and `main(arguments) -> exit status`."""

import argparse
from collections.abc import Sequence

from torch_lowcomm.cli import bench, info, relay, run, secret


def main(argv: Sequence[str]) -> int:
    """Runs a command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_lowcomm", description="Training over slow links.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (info, run, bench, secret, relay):
        name = command.__name__.rsplit(".", 1)[-1]
        sub = commands.add_parser(name, help=(command.__doc__ or "").splitlines()[0], description=command.__doc__)
        command.add_arguments(sub)
        sub.set_defaults(main=command.main)
    arguments = parser.parse_args(argv)
    return int(arguments.main(arguments))
