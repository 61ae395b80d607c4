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
