"""Tests on links of the lab (benchmarks/linklab): its path, the ranks' environment, and whether labs can be made."""

import os

import pytest
from linklab import LabUnavailable, tools
from ranks.starters import TESTS

ROOT = TESTS.parents[1]
BENCHMARKS = ROOT / "benchmarks"
# The package as this tree has it, where it is not the installed one.
ENV = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def expect_labs(*needed):
    """Skips the test where this machine cannot make a lab, or lacks another tool that the test needs, with the reason."""
    try:
        tools.check(*needed)
    except LabUnavailable as why:
        pytest.skip(str(why))


def add_interfaces(lab, name):
    """Joins hosts 0 and 1 of a lab by a second, unshaped pair of interfaces, 10.99.0.1 and .2; returns their namespaces."""
    spaces = [lab.namespace(host) for host in (0, 1)]
    tools.ip("link", "add", name, "type", "veth", "peer", "name", name, "netns", spaces[1], inside=spaces[0])
    for host, space in enumerate(spaces):
        tools.ip("address", "add", f"10.99.0.{host + 1}/24", "dev", name, inside=space)
        tools.ip("link", "set", name, "up", inside=space)
    return spaces
