"""A rank of a site is killed or stopped in the middle of every part of an outer step: its site ends, the others go on."""

import signal

import pytest
import ranks
from site_phases import JOINING, OUTER_STEP, STAGES, expect_survivors, lose_sites
from site_rank import DEADLINE_S


def _expect_phases(store, how, stay, number, ops, **options):
    """Returns the loss of the sites that stay, at the end."""
    size = 2 * (stay + len(ops))
    gone = dict.fromkeys(range(2 * stay, size), -signal.SIGKILL)
    found = ranks.run_ranks(
        lose_sites, size, store.port, how, stay, number, ops, options, timeout=2 * DEADLINE_S, allow_exit=gone
    )
    parts = 2 if how == "pipeline" else 1
    (loss,) = {expect_survivors(found[place : 2 * stay : parts]) for place in range(parts)}
    return loss


def _expect_faultless(loss, store, how, stay, **options):
    """The loss is that of the same sites without any fault, within 1 %."""
    faultless = _expect_phases(store, how, stay, signal.SIGKILL, (), **options)
    assert 0.99 < loss / faultless < 1.01, (loss, faultless)


@pytest.mark.parametrize(
    ("mode", "ops"), [("continue", OUTER_STEP), ("sync", OUTER_STEP + JOINING)], ids=["continue", "sync"]
)
def test_two_sites_go_on_without_a_third_that_is_killed_in_any_op(store, mode, ops):
    loss = _expect_phases(store, "fsdp2", 2, signal.SIGKILL, ops, mode=mode)
    if mode == "continue":
        _expect_faultless(loss, store, "fsdp2", 2, mode=mode)


def test_a_pipeline_goes_on_without_another_that_is_killed_in_any_op(store):
    loss = _expect_phases(store, "pipeline", 1, signal.SIGKILL, STAGES + JOINING, mode="sync")
    _expect_faultless(loss, store, "pipeline", 1, mode="sync")


@pytest.mark.parametrize(
    ("how", "stay", "ops"), [("fsdp2", 2, OUTER_STEP), ("pipeline", 1, STAGES + JOINING)], ids=["fsdp2", "pipeline"]
)
def test_the_others_go_on_without_a_site_that_is_stopped_in_any_op(store, how, stay, ops):
    _expect_phases(store, how, stay, signal.SIGSTOP, ops, mode="continue", timeout_s=6.0)
