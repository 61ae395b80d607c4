"""A rank of a site is killed or stopped in the middle of every part of an outer step: its site ends, the others go on."""

from functools import partial

import pytest
from site_phases import JOINING, KILLED, STOPPED, expect_faultless, expect_phases, lose_sites

# An interval by the clock has as many inner steps as a busy machine lets it have, and an outer step goes as far.
BY_THE_CLOCK = {"mode": "continue", "sync_every": 10_000, "sync_seconds": 0.1, "bound": 1.02}


@pytest.mark.slow
@pytest.mark.parametrize("quorum", [{}, {"quorum": 2, "grace_s": 1.0}], ids=["all", "quorum"])
def test_two_sites_go_on_without_a_third_that_is_lost_in_any_op(store, quorum):
    faults = {
        "DiLoCoX: collect a site's parameters": KILLED,
        "outer_step": STOPPED,
        "DiLoCoX outer step": KILLED,
        "DiLoCoX: spread a site's parameters": STOPPED,
        "DiLoCoX check": KILLED,
        JOINING[0]: KILLED,
        JOINING[1]: STOPPED,
        JOINING[2]: KILLED,
    }
    expect_phases(store.port, "fsdp2", 2, faults, mode="sync", rank=16, adapt_rank=True, timeout_s=6.0, **quorum)


@pytest.mark.slow
def test_sites_that_lose_others_train_as_those_that_do_not(store):
    options = {"mode": "restart", "fragments": 2}
    faults = {"outer_step": KILLED, "DiLoCoX: spread a site's parameters": KILLED}
    end = expect_phases(store.port, "fsdp2", 2, faults, partial(lose_sites, outer_steps=80), **options)
    expect_faultless(end, store.port, "fsdp2", 2, **options)


@pytest.mark.slow
def test_a_pipeline_goes_on_without_another_that_is_lost(store):
    faults = {"DiLoCoX outer step": KILLED, "DiLoCoX: compare clocks in a site": STOPPED, JOINING[1]: KILLED}
    expect_phases(store.port, "pipeline", 1, faults, timeout_s=6.0, **BY_THE_CLOCK)
