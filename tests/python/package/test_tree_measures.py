"""The tree stays as small for a reader as it has become."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import tree_measures

MEASURES = tree_measures.measures()


@pytest.mark.parametrize("name", MEASURES)
def test_measure_is_within_its_bound(name):
    least, most = tree_measures.BOUNDS[name]
    assert least <= MEASURES[name] <= most, f"{name}: expected {least}...{most}, got {MEASURES[name]:g}"


def test_every_bound_is_measured():
    assert MEASURES.keys() == tree_measures.BOUNDS.keys()
