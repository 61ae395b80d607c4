"""Run a script, or with -m a module, that asks for "gloo" on lowcomm instead: `torchrun … -m torch_lowcomm run script.py …`.

The groups keep the name "gloo", so that the script's own checks hold. LOWCOMM_POLICY and the other variables say what is
compressed (nothing, by default). Processes that the script starts inherit LOWCOMM_AS_GLOO=1, which puts lowcomm in gloo's
place in each of them when it imports torch.
"""

import argparse
import importlib.util
import logging
import os
import runpy
import sys
from pathlib import Path

from torch_lowcomm import as_gloo
from torch_lowcomm._log import logger
from torch_lowcomm.summary import print_at_exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the script is a module's name, as for python -m"
    )
    parser.add_argument("--summary", action="store_true", help="print what was sent (lc.summary) at the end of rank 0")
    parser.add_argument("script", help="the Python script, or module, to run as __main__")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script sees as sys.argv[1:]")


def _show_log() -> None:
    """Shows lowcomm's INFO lines on stderr until the script configures logging itself."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    handler.addFilter(lambda _: logger.handlers == [handler] and not logging.getLogger().handlers)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _is_module(name: str) -> bool:
    """Whether there is a module of this name; errors of the packages that it is in are raised."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return False
    except ValueError:
        return False


def main(arguments: argparse.Namespace) -> int:
    """Puts lowcomm in gloo's place and runs the script as `python script.py …`, or `python -m module …`, would. Returns 0; 2
    if there is no such script or module.
    """
    script = Path(arguments.script)
    if not arguments.module and not script.is_file():
        print(
            f"torch_lowcomm run: expected a Python script, found none at {script} (-m takes a module)", file=sys.stderr
        )
        return 2
    _show_log()
    os.environ["LOWCOMM_AS_GLOO"] = "1"
    if arguments.summary:
        os.environ["LOWCOMM_SUMMARY"] = "1"
        print_at_exit(os.environ)
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        logger.warning("TORCH_DEVICE_BACKEND_AUTOLOAD is not 1: processes that the script starts will use torch's gloo")
    as_gloo.install()
    sys.argv = [arguments.script, *arguments.arguments]
    if arguments.module:
        sys.path[0] = str(Path.cwd())
        if not _is_module(arguments.script):  # which imports the packages that it is in
            print(f"torch_lowcomm run: expected a module's name, found none by {arguments.script!r}", file=sys.stderr)
            return 2
        runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
        return 0
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
    return 0
