"""The command line: run a command on slow links, measure the standard set and lanes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linklab import tools
from linklab.errors import LabError, LabUnavailable
from linklab.lab import Lab

# Of a machine or user that can make no lab; what autotools call a skipped test.
EXIT_UNAVAILABLE = 77


def _rate_of(text: str) -> tuple[int, str]:
    host, equals, rate = text.partition("=")
    if not equals or not host.isdecimal():
        raise argparse.ArgumentTypeError(f"expected HOST=RATE such as 1=10mbit/20mbit, got {text!r}")
    return int(host), rate


def parser() -> argparse.ArgumentParser:
    """Of all commands."""
    top = argparse.ArgumentParser(prog="linklab", description="Slow links out of network namespaces; needs root.")
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="a command, a rank a host, with torchrun's environment")
    run.add_argument("--hosts", type=int, default=2, help="2 to 8 (2)")
    run.add_argument("--rate", default="100mbit", help="of every host: 100mbit, 10mbit/20mbit (up/down), unshaped")
    run.add_argument(
        "--rate-of", type=_rate_of, action="append", default=[], metavar="HOST=RATE", help="of one; may be repeated"
    )
    run.add_argument("--delay", help="of every frame a host sends, such as 20ms; a round trip takes two")
    run.add_argument("--loss", help="of the frames each host sends, such as 0.1%%")
    run.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="until the ranks are ended (3600)")
    run.add_argument("program", nargs="+", metavar="COMMAND", help="after `--`")
    standard = commands.add_parser("standard", help="collectives on slow links against gloo and the links' bounds")
    standard.add_argument(
        "--only", nargs="+", metavar="SET", help="100mbit, 1gbit, unshaped, 4ranks (these); slow1of3, …1of4, slowup1of3"
    )
    lanes = commands.add_parser("lanes", help="a group's barrier while another group's bulk fills a 10 Mbit/s link")
    for command in (standard, lanes):
        command.add_argument("--repetitions", type=int, default=9, help="of each time (9)")
        command.add_argument("--json", type=Path, help="versions, machine, rows with every time, gates")
    return top


def _run(args: argparse.Namespace) -> int:
    options = {"rate": args.rate, "rate_of": dict(args.rate_of), "delay": args.delay, "loss": args.loss}
    with Lab(hosts=args.hosts, **options) as lab:
        ended = lab.run(args.program, timeout_s=args.timeout, show=True)
        for host, rank in enumerate(ended):
            traffic = lab.bytes(host)
            print(
                f"# host {host}: exit {rank.code}, sent {traffic.sent / 1e6:.3f} MB, "
                f"received {traffic.received / 1e6:.3f} MB on {lab.links[host]}",
                file=sys.stderr,
            )
        if drops := lab.forwarder_drops():
            print(
                f"# the forwarder lost {drops} frames for want of time: the links were slower than asked",
                file=sys.stderr,
            )
    return next((128 - rank.code if rank.code < 0 else rank.code for rank in ended if rank.code), 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 77 with one sentence where no lab can be made, 2 for wrong arguments."""
    top = parser()
    args = top.parse_args(argv)
    try:
        tools.check()
        if args.command == "standard":
            from linklab import standard

            return standard.main(args)
        if args.command == "lanes":
            from linklab import lanes

            return lanes.main(args)
        return _run(args)
    except LabUnavailable as error:
        print(f"linklab: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except ValueError as error:
        top.error(str(error))
    except LabError as error:
        print(f"linklab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
