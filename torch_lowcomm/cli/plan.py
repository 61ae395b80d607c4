"""Compare the ways to train a model over a link: seconds, bytes, memory and loss, and the lines to paste.

The model comes from a function of a script, `plan train.py:build`, which returns (module, batch of one rank) and is measured
here, or from numbers: --parameters, --step-seconds and, for pipelines, --tokens, --width and --layers. The link comes from
--link, the file that `doctor --json` wrote, or from --rate, --rtt and --sites.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import torch_lowcomm as lc  # whose planner is imported when it is first used


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("build", nargs="?", metavar="SCRIPT.py:FUNCTION", help="makes (module, batch)")
    parser.add_argument("--parameters", type=float, metavar="N", help="trained numbers, without a script")
    parser.add_argument("--step-seconds", type=float, metavar="S", help="of a step without communication")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a rank's batch")
    parser.add_argument("--width", type=int, metavar="D", help="of the residual stream")
    parser.add_argument("--layers", type=int, metavar="L", help="blocks of a decoder (1)")
    parser.add_argument("--link", metavar="FILE", help="what `doctor --json` wrote")
    parser.add_argument("--rate", metavar="R", help="of each site's link, 100mbit, or up/down: 10mbit/100mbit")
    parser.add_argument("--rtt", metavar="T", help="round trip between sites (1ms)")
    parser.add_argument("--loss", type=float, metavar="P", help="share of segments that are lost (0)")
    parser.add_argument("--sites", type=int, metavar="M", help="ends of slow links (2)")
    parser.add_argument("--ranks-per-site", type=int, metavar="G", help="(1)")
    parser.add_argument("--max-loss", type=float, default=1.01, metavar="F", help="factor on the loss (1.01)")
    parser.add_argument("--fine-tuning", action="store_true", help="of a trained model, whose samples come back")
    parser.add_argument("--memory", type=float, metavar="BYTES", help="of a rank, 80e9 (this machine's)")
    parser.add_argument("--total-tokens", type=float, metavar="N", help="of the training (20 a parameter)")


def main(arguments: argparse.Namespace) -> int:
    """Prints the table. Returns 0; ValueError for wrong arguments."""
    try:
        link = _link(arguments)
        model, batch = _of_script(arguments) if arguments.build else (_of_numbers(arguments), None)
        names = ("max_loss", "memory", "total_tokens", "fine_tuning")
        print(lc.plan(model, batch, link=link, **{name: getattr(arguments, name) for name in names}))
    except (OverflowError, OSError) as error:
        raise ValueError(str(error)) from error
    return 0


def _link(a: argparse.Namespace) -> lc.planner.Link:
    if (a.link is None) == (a.rate is None):
        raise ValueError("expected --link or --rate, got " + ("neither" if a.link is None else "both"))
    if a.link is not None:
        _expect_none(a, "--link", "sites", "rtt", "loss", "ranks_per_site")
        return lc.planner.Link.measured(a.link)
    sites, ranks = (least if given is None else given for given, least in ((a.sites, 2), (a.ranks_per_site, 1)))
    return lc.planner.Link.of(a.rate, sites, round_trip=a.rtt or "1ms", loss=a.loss or 0.0, ranks_per_site=ranks)


def _expect_none(a: argparse.Namespace, beside: str, *names: str) -> None:
    if told := [name.replace("_", "-") for name in names if getattr(a, name) is not None]:
        raise ValueError(f"expected no --{told[0]} beside {beside}, which has it")


def _of_script(a: argparse.Namespace) -> Any:
    _expect_none(a, "a script", "parameters", "step_seconds", "tokens", "width", "layers")
    path, _, name = a.build.rpartition(":")
    if not path or not name.isidentifier():
        raise ValueError(f"expected SCRIPT.py:FUNCTION, got {a.build!r}")
    sys.path.insert(0, str(Path(path).parent))  # as Python has it for a script
    made = runpy.run_path(path, run_name="torch_lowcomm_plan").get(name)
    found = made() if callable(made) else None
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"{a.build}: expected a function that returns (module, batch), got {type(found).__name__}")
    return found


def _of_numbers(a: argparse.Namespace) -> lc.planner.Training:
    if a.parameters is None or a.step_seconds is None:
        raise ValueError("expected SCRIPT.py:FUNCTION, or --parameters and --step-seconds, got neither")
    if a.tokens is not None and (a.width is None or a.layers is None):
        raise ValueError("--tokens: expected --width and --layers too, without which no pipeline is planned")
    width, layers = a.width or 0, 1 if a.layers is None else a.layers
    matrices = [(width, width)] * (int(a.parameters) // width**2) if width else []
    third = a.step_seconds / 3  # a backward pass computes twice what a forward pass does
    codings = lc.planner.codings()
    return lc.planner.Training(
        int(a.parameters), third, 2 * third, 0.0, a.tokens or 0, width, layers, matrices, codings
    )
