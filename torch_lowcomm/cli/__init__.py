"""The command line, `lowcomm` or `python -m torch_lowcomm`.

Each command has a module with `add_arguments(parser)` and `main(arguments) -> exit status`. A ValueError of a command becomes one
line on stderr and the status 2, an OSError the status 1.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_lowcomm._version import __version__
from torch_lowcomm.cli import doctor, info, plan, relay, run, status, store, top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; `argv` is None for the words that this process was started with."""
    prog = "lowcomm" if Path(sys.argv[0]).name == "lowcomm" else "python -m torch_lowcomm"
    parser = argparse.ArgumentParser(prog=prog, description="Training over slow links.")
    version = f"torch_lowcomm {__version__} (torch {torch.__version__}, Python {sys.version.split()[0]})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (info, doctor, plan, run, top, status, store, relay):
        name = command.__name__.rsplit(".", 1)[-1]
        sub = commands.add_parser(name, help=(command.__doc__ or "").splitlines()[0], description=command.__doc__)
        command.add_arguments(sub)
        sub.set_defaults(main=command.main)
    arguments = parser.parse_args(argv)
    if arguments.command == "run":  # whose script's errors are its own
        return int(run.main(arguments))
    try:
        return int(arguments.main(arguments))
    except (ValueError, OSError) as error:
        print(f"torch_lowcomm {arguments.command}:", *str(error).split(), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
