"""A rank of a site is killed or stopped in the middle of every part of an outer step: its site ends, the others go on."""

import signal

import pytest
from site_phases import CLOCK, JOINING, OUTER_STEP, STAGES, expect_faultless, expect_phases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ops"),
    [
        ({"mode": "continue"}, OUTER_STEP),
        ({"mode": "restart", "fragments": 2}, OUTER_STEP),
        ({"mode": "sync", "rank": 16, "adapt_rank": True}, OUTER_STEP + JOINING),
    ],
    ids=["continue", "fragments", "adaptive factors"],
)
def test_two_sites_go_on_without_a_third_that_is_killed_in_any_op(store, options, ops):
    end = expect_phases(store.port, "fsdp2", 2, signal.SIGKILL, ops, **options)
    expect_faultless(end, store.port, "fsdp2", 2, **options)


@pytest.mark.slow
def test_a_pipeline_goes_on_without_another_that_is_killed_in_any_op(store):
    end = expect_phases(store.port, "pipeline", 1, signal.SIGKILL, STAGES + JOINING, mode="sync")
    expect_faultless(end, store.port, "pipeline", 1, mode="sync")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "stay", "ops", "options"),
    [
        ("fsdp2", 2, OUTER_STEP + JOINING, {}),
        # An interval by the clock has as many inner steps as a busy machine lets it have, and an outer step goes as far.
        ("pipeline", 1, (*STAGES, CLOCK, *JOINING), {"sync_every": 10_000, "sync_seconds": 0.1, "bound": 1.02}),
    ],
    ids=["fsdp2", "pipeline by the clock"],
)
def test_the_others_go_on_without_a_site_that_is_stopped_in_any_op(store, how, stay, ops, options):
    options = options | {"mode": "continue"}
    end = expect_phases(store.port, how, stay, signal.SIGSTOP, ops, timeout_s=6.0, **options)
    # By the clock an interval has another number of inner steps where nobody waits for sites to come.
    if how == "fsdp2":
        expect_faultless(end, store.port, how, stay, **options)
