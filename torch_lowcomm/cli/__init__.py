"""The command line, `lowcomm` or `python -m torch_lowcomm`.

Each command has a module with `add_arguments(parser)` and `main(arguments) -> exit status`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_lowcomm._version import __version__
from torch_lowcomm.cli import bench, doctor, info, plan, relay, run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; `argv` is None for the words that this process was started with."""
    prog = "lowcomm" if Path(sys.argv[0]).name == "lowcomm" else "python -m torch_lowcomm"
    parser = argparse.ArgumentParser(prog=prog, description="Training over slow links.")
    version = f"torch_lowcomm {__version__} (torch {torch.__version__}, Python {sys.version.split()[0]})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (info, doctor, plan, run, bench, relay):
        name = command.__name__.rsplit(".", 1)[-1]
        sub = commands.add_parser(name, help=(command.__doc__ or "").splitlines()[0], description=command.__doc__)
        command.add_arguments(sub)
        sub.set_defaults(main=command.main)
    arguments = parser.parse_args(argv)
    return int(arguments.main(arguments))
