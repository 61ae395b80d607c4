"""A group that is over says so at once, whoever would have served the op, and every rank hears the cause."""

import pytest
import torch
import torch.distributed as dist

import torch_lowcomm as lc

LOST = r"of a lost group; destroy it and make a new one\. First cause: .*expected|of a lost group.*First cause"


def _lose(r):
    """Rank 0 gives the group up; the others hear of it in their next op."""
    if r.rank == 0:
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    with pytest.raises(dist.DistBackendError):
        dist.all_gather_into_tensor(torch.empty(4 * r.size), torch.ones(4))


@pytest.mark.on("pair", "quad")
def test_every_op_of_a_lost_group_names_the_first_cause(r):
    """Later ops fail with the first cause, and do not wait for a peer."""
    r.init("lowcomm", timeout_s=1000)  # the job's deadline is far less: whoever waits for it fails the test
    _lose(r)
    x = torch.ones(3)
    peer = (r.rank + 1) % r.size
    ops = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "barrier": dist.barrier,
        "monitored_barrier": lambda: dist.group.WORLD.monitored_barrier(),
        "send": lambda: dist.send(x, peer),
        "recv": lambda: dist.recv(x, peer),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(3 * r.size), x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * r.size)),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(r.size), torch.ones(r.size)),
    }
    for name, op in ops.items():
        with pytest.raises(dist.DistBackendError, match=rf"(?s){name}.*{LOST}"):
            op()
    assert torch.equal(x, torch.ones(3))
    factor = torch.full((3,), 2.0)
    with pytest.raises(dist.DistBackendError, match=LOST):
        dist.all_reduce(factor, op=dist._make_nccl_premul_sum(2.0))
    assert torch.equal(factor, torch.full((3,), 2.0)), "PREMUL_SUM multiplied what it did not reduce"
    dist.destroy_process_group()
    r.init("lowcomm")
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((3,), float(r.size)))


@pytest.mark.on("pair", "quad")
def test_an_abort_breaks_an_agreement(r):
    """A rank that aborts while its peers agree on a policy: they hear it, long before the progress deadline."""
    r.init("lowcomm", timeout_s=1000)
    dist.barrier()
    if r.rank == 0:
        r.hear("in it")
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        dist.destroy_process_group()
        return
    if r.rank == 1:
        r.say("in it")
    with pytest.raises(dist.DistBackendError, match="aborted by the program of rank 0|gave the group up|[Cc]losed"):
        lc.set_policy(None, "all_gather=minmax8")
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["exact", "coded"])
def test_a_time_out_ends_the_group(r, how):
    """A time-out ends the group: coded ops, exact ones and messages name the first cause, and so do the peers."""
    policy = "all_gather=minmax8; broadcast=minmax8"
    options = {"min_bytes": 0, "flight_record": 0}
    r.init("lowcomm", pg_options=lc.Options(policy=policy, **options))
    x, ints = torch.ones(300), torch.ones(3, dtype=torch.int64)
    dist.all_reduce(ints)
    r.set_deadline(1.5)
    ops = {
        "exact": lambda: dist.all_reduce(ints),
        "coded": lambda: dist.broadcast(x, 0),
        "own": lambda: dist.all_gather_into_tensor(torch.empty(300 * r.size), x),
        "message": lambda: dist.send(x, 1 - r.rank),
    }
    cause = r"all_reduce failed between rank 0 .* and rank 1 .*Timed out .*\[op all_reduce, sequence 2,"
    if r.rank == 0:
        with pytest.raises(dist.DistBackendError, match=cause):
            dist.all_reduce(ints)
        r.say("failed")
    else:
        r.hear("failed")
        with pytest.raises(dist.DistBackendError, match=rf"(?s)rank 0 .*gave the group up: .*{cause}"):
            ops[how]()
    for _ in range(2):
        for name, op in ops.items():
            with pytest.raises(dist.DistBackendError, match=rf"(?s)of a lost group.*First cause: .*{cause}"):
                op()
                pytest.fail(name)
    dist.destroy_process_group()
    r.init("lowcomm")
    dist.all_reduce(ints.fill_(1))
    assert torch.equal(ints, torch.full((3,), r.size))


def test_futures_of_exact_ops_carry_the_named_error(r):
    """The error that a future carries is the one that wait() raises."""
    r.init("lowcomm")
    x = torch.ones(3)
    dist.all_reduce(x)
    if r.rank == 0:
        r.set_deadline(1.5)
        future = dist.all_reduce(x, async_op=True).get_future()
        with pytest.raises(dist.DistBackendError, match=r"all_reduce failed between rank 0 .*sequence 2.*elapsed \d"):
            future.wait()
        r.say("failed")
    r.hear("failed")
    dist.destroy_process_group()
