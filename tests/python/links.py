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


def add_interfaces(lab, name, network=99, *, joined=True):
    """Gives the hosts of a lab second, unshaped interfaces, 10.99.0.1, .2, …, which lead nowhere unless they are joined; returns
    their namespaces.
    """
    spaces = [lab.namespace(host) for host in range(lab.hosts)]
    tools.ip("link", "add", name, "type", "bridge", "forward_delay", "0", inside=lab.switch)
    tools.ip("link", "set", name, "up", inside=lab.switch)
    for host, space in enumerate(spaces):
        plug = f"{name}{host}"
        tools.ip("link", "add", plug, "type", "veth", "peer", "name", name, "netns", space, inside=lab.switch)
        tools.ip("link", "set", plug, *(("master", name) if joined else ()), "up", inside=lab.switch)
        tools.ip("address", "add", f"10.{network}.0.{host + 1}/24", "dev", name, inside=space)
        tools.ip("link", "set", name, "up", inside=space)
    return spaces
