"""Show what all ranks of a job do, again and again: the page "lowcomm" of torch's debug server as a table.

Every rank of the job has called start_debug_server(handlers=lc.debug_handlers()), which serves HOST:25999 on rank 0's machine
(docs/watch.md).
"""

import argparse
import contextlib
import http.client
import sys
import time
import urllib.request

from torch_lowcomm.cli.sockets import host_and_port

_EVERY_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("address", metavar="HOST:PORT", help="of rank 0's debug server")
    parser.add_argument("--once", action="store_true", help="print it once")
    parser.add_argument("--all", action="store_true", help="all links, not the ten that need a look first")


def main(arguments: argparse.Namespace) -> int:
    """Prints tables until Ctrl-C. Returns 0; ValueError for a wrong argument, OSError where no such page answers."""
    host, port = host_and_port(arguments.address)
    url = f"http://{host}:{port}/lowcomm_text{'?all' if arguments.all else ''}"
    shown = _page(url)
    with contextlib.suppress(KeyboardInterrupt):
        while not arguments.once:
            print(("\033[H\033[2J" if sys.stdout.isatty() else "") + shown, flush=True)
            time.sleep(_EVERY_S)
            shown = _page(url)
        time.sleep(_EVERY_S)  # rates of links need two looks
        print(_page(url), end="")
    return 0


def _page(url: str) -> str:
    """Returns the page; an OSError with what to do where there is none."""
    try:
        with urllib.request.urlopen(url, timeout=90) as answer:  # the server waits 60 s for a rank
            return answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        remedy = "each rank calls start_debug_server(handlers=lc.debug_handlers()), see docs/watch.md"
        raise OSError(f"no page of lowcomm at {url}: {getattr(error, 'reason', error)}: {remedy}") from error
