"""Keep the store at which machines meet (`lc.Membership`, `lc.StoreExchange`). It runs until it is interrupted.

It is torch's TCPStore, which keeps everything in memory and is not encrypted: who reaches the port can read and change it.
"""

import argparse
import signal
import socket

import torch.distributed as dist

from torch_lowcomm.cli.sockets import host_and_port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--listen", default=":29400", metavar="HOST:PORT", help="where; without HOST on all interfaces (:29400)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Keeps it until SIGINT or SIGTERM. Returns 0; ValueError for an address that is none, OSError for one that is taken."""
    where = arguments.listen
    host, port = host_and_port(f"0.0.0.0{where}" if where.startswith(":") else where)
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    ends = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # also on the store's thread
    _store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    print(f"store at {host}:{port}", flush=True)
    signal.sigwait(ends)
    return 0
