"""torch_lowcomm/_option_table.py: None is a value only of the options whose default it is."""

import dataclasses

import pytest

from torch_lowcomm.diloco import DiLoCoXOptions
from torch_lowcomm.seed_replay import SeedReplayOptions, StoreExchangeOptions

TABLES = (DiLoCoXOptions(sync_every=10), SeedReplayOptions(), StoreExchangeOptions())
WITH_RANGE = [(table, field) for table in TABLES for field in dataclasses.fields(table) if field.metadata]


@pytest.mark.parametrize(
    ("table", "field"), WITH_RANGE, ids=[f"{table.owner}-{field.name}" for table, field in WITH_RANGE]
)
def test_none_is_refused_by_name_unless_it_is_the_default(table, field):
    table = dataclasses.replace(table, **{field.name: None})
    if field.default is None:
        table.expect_in_range()
        return
    with pytest.raises((TypeError, ValueError), match=f"{table.owner}: {field.name}: expected .*, got None"):
        table.expect_in_range()
