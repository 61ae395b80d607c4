"""A rank of a site is killed or stopped while its site saves or ends training: the others save, and end, without it."""

import contextlib
import os
import signal

import diloco_model
import pytest
import ranks
import torch.distributed as dist
from site_rank import DEADLINE_S, SiteRank, at, die, expect_equal, site_of


def _loses_the_last(r, port, how, op, number):
    """The last site's second rank is lost in an op; the first is told, and ended by its launcher.

    The first site comes to the op only then: all others wait in it for its part. In the ops of one word, which the lost rank
    has given already, the others need nothing more from it: they may not notice before their next op, if there is one.
    """
    sites, saves = r.size // 2, op == "DiLoCoX state"
    # Without checks, in which they would wait for the average that the first site has yet to apply.
    trained = SiteRank(r, port, site_of(r.rank), how, mode="continue", timeout_s=6.0, check_every=0)
    trained.steps_until(sites)
    last = trained.opt.report["outer_steps"] + 4
    held = op == "outer_step"  # before the outer step whose average finish() waits for
    trained.until_outer_step(last - (held and r.rank < 2))
    if r.rank >= r.size - 2:
        if r.rank == r.size - 1:
            at(op, lambda: _fault(r, number))
        with pytest.raises(dist.DistBackendError):
            trained.opt.state_dict() if saves else trained.opt.finish()
        with contextlib.suppress(ProcessLookupError):  # it was killed
            os.kill(int(r.hear("faulty")), signal.SIGKILL)
        die()
    if r.rank < 2:
        r.hear("faulty", timeout_s=30)
    if saves:
        with trained.going_on():
            trained.opt.state_dict()
        trained.until_outer_step(last + 4)
        saved = trained.outer_state()
    ended = trained.ended() if saves else trained.end_at(last)
    assert len(trained.lost) <= 1
    assert trained.lost or op == "DiLoCoX: leaving the group"  # else one of them may have left when another one notices
    return ended, saved if saves else {}


def _fault(r, number):
    r.say("faulty", os.getpid())
    os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "how", "number"),
    [
        ("outer_step", "pipeline", signal.SIGKILL),
        ("DiLoCoX: leaving the group", "fsdp2", signal.SIGKILL),
        ("DiLoCoX state", "fsdp2", signal.SIGSTOP),
    ],
    ids=["the last average", "leaving", "saving"],
)
def test_the_others_end_without_a_site_that_is_lost(store, op, how, number):
    gone = dict.fromkeys((4, 5), -signal.SIGKILL)
    found = ranks.run_ranks(_loses_the_last, 6, store.port, how, op, number, timeout=DEADLINE_S, allow_exit=gone)
    for place in range(2):
        stay = found[place:4:2]
        expect_equal([ended for ended, _ in stay])
        for _, saved in stay:
            assert not diloco_model.differing(saved, stay[0][1]), place
