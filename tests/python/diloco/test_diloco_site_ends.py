"""A rank of a site is killed while its site saves or ends training: the others save, and end, without it."""

import contextlib
import signal

import diloco_model
import pytest
import ranks
import torch.distributed as dist
from site_rank import DEADLINE_S, SiteRank, at, die, expect_equal, site_of


def _loses_the_last(r, port, how, op, saves):
    """The last site's second rank is killed in an op; the first is told, and ended by its launcher."""
    sites = r.size // 2
    trained = SiteRank(r, port, site_of(r.rank), how, mode="continue")
    trained.steps_until(sites)
    trained.until_outer_step(trained.opt.report["outer_steps"] + 4)
    if r.rank >= r.size - 2:
        if r.rank == r.size - 1:
            at(op, die, once=True)
        with pytest.raises(dist.DistBackendError):
            while True:  # an op may be over before a thread sees it: then in the next one, where nobody answers
                trained.opt.state_dict() if saves else trained.opt.finish()
        die()
    saved = None
    if saves:
        with contextlib.suppress(dist.DistBackendError):  # at some of the others: there is no state of this step
            trained.opt.state_dict()
        trained.until_outer_step(trained.opt.report["outer_steps"] + 4)
        saved = trained.outer_state()
    ended = trained.ended()
    # A site that has left knows nothing of one that is killed in its last op.
    assert len(trained.lost) == 1 or (op == "DiLoCoX: leaving the group" and not trained.lost)
    assert trained.opt.report["participating"] == sites - len(trained.lost)
    return saved, ended


@pytest.mark.parametrize("how", ["fsdp2", "pipeline"])
@pytest.mark.parametrize(
    ("op", "saves"),
    [("outer_step", False), ("DiLoCoX: leaving the group", False), ("DiLoCoX state", True)],
    ids=["the last average", "leaving", "saving"],
)
def test_the_others_end_without_a_site_that_is_killed(store, how, op, saves):
    size = 6 if how == "fsdp2" else 4
    gone = dict.fromkeys(range(size - 2, size), -signal.SIGKILL)
    found = ranks.run_ranks(_loses_the_last, size, store.port, how, op, saves, timeout=DEADLINE_S, allow_exit=gone)
    for place in range(2):
        stay = found[place : size - 2 : 2]
        expect_equal([ended for _, ended in stay])
        for saved, _ in stay if saves else ():
            assert saved and not diloco_model.differing(saved, stay[0][0])
