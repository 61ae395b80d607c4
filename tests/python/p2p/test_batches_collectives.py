"""A collective inside torch's coalescing block: the results are gloo's, and a mistake is raised at the block's end alone."""

import pytest
import torch
import torch.distributed as dist
from collective_cases import bits, rooted, values
from compressed_by_hand import last_step, options
from group_check import check_group
from torch.distributed.distributed_c10d import _coalescing_manager, _world

import torch_lowcomm as lc

OWN = "all_reduce=sym8:bucket=64; all_to_all=sym8:bucket=64; broadcast=sym8:bucket=64; gather=sym8:bucket=64"
N = 512


def _block(**kwargs):
    return _coalescing_manager(device=torch.device("cpu"), **kwargs)


def _outs(r, n=N):
    return [torch.zeros(n) for _ in range(r.size)]


def _good(r, group, salt):
    """Name to (outputs, call), of every collective that a block can hold: with the same inputs on any group."""
    x = values(torch.float32, N, r.rank, salt)
    whole = values(torch.float32, N * r.size, r.rank, salt)
    parts = list(whole.chunk(r.size))
    lists, single, root = _outs(r), torch.zeros(N), r.rank == 0
    to_root = _outs(r) if root else []
    reduced, shared, flat, from_root, scattered = (
        x.clone(),
        x.clone(),
        torch.zeros(N * r.size),
        x.clone(),
        torch.zeros(N),
    )
    exchanged = _outs(r)
    every = {"group": group, "async_op": True}
    return {
        "all_gather": (lists, lambda: dist.all_gather(lists, x, **every)),
        "reduce_scatter": ([single], lambda: dist.reduce_scatter(single, parts, **every)),
        "broadcast": ([from_root], lambda: dist.broadcast(from_root, 0, **every)),
        "reduce": ([reduced] if root else [], lambda: dist.reduce(reduced, 0, **every)),
        "gather": (to_root, lambda: dist.gather(x, to_root or None, 0, **every)),
        "scatter": ([scattered], lambda: dist.scatter(scattered, parts if root else None, 0, **every)),
        "all_to_all": (exchanged, lambda: dist.all_to_all(exchanged, parts, **every)),
        "all_to_all_single": ([flat], lambda: dist.all_to_all_single(flat, whole, **every)),
        "all_reduce_in_c10d": ([shared], lambda: (group or dist.group.WORLD).allreduce([shared])),
        "barrier": ([], lambda: dist.barrier(**every)),
    }


def _wrong(r):
    """Name to calls, each a mistake that lowcomm finds: (type of the error, its text, call)."""
    x, shared, whole = torch.ones(N), torch.zeros(1).expand(N), torch.ones(N * r.size)
    transposed = torch.zeros(1).expand(N * r.size)
    world = dist.group.WORLD
    ranks, short, other = _outs(r), _outs(r, N)[:-1], [torch.zeros(N, dtype=torch.float64) for _ in range(r.size)]
    parts = list(whole.chunk(r.size))
    gathering, astray = (rooted(dist.GatherOptions(), root) for root in (0, 7))
    reducing, scattering = rooted(dist.ReduceOptions(), r.rank), rooted(dist.ScatterOptions(), 1 - r.rank)
    same_memory = "share memory"
    return {
        "all_gather": [
            (ValueError, "expected 2 outputs", lambda: world.allgather([short], [x])),
            (TypeError, "expected outputs of dtype", lambda: world.allgather([other], [x])),
            (ValueError, same_memory, lambda: world.allgather([[shared] * r.size], [x])),
        ],
        "all_gather_into_tensor": [
            (ValueError, "expected an output of", lambda: world._allgather_base(x, x)),
            (TypeError, "expected outputs of dtype", lambda: world._allgather_base(whole.double(), x)),
        ],
        "all_gather_coalesced": [
            (ValueError, "expected 2 output lists", lambda: world.allgather_coalesced([[x]], [x])),
            (ValueError, "expected 1 outputs", lambda: world.allgather_into_tensor_coalesced([], [x])),
            (TypeError, "expected outputs of dtype", lambda: world.allgather_into_tensor_coalesced([whole.int()], [x])),
        ],
        "reduce_scatter": [
            (ValueError, "expected 2 inputs", lambda: world.reduce_scatter([x], [parts[:1]])),
            (TypeError, "expected an output of dtype", lambda: world.reduce_scatter([x.double()], [parts])),
            (ValueError, same_memory, lambda: world.reduce_scatter([shared], [parts])),
        ],
        "reduce_scatter_tensor": [
            (ValueError, "expected an input of", lambda: world._reduce_scatter_base(x, x)),
            (TypeError, "expected an output of dtype", lambda: world._reduce_scatter_base(x.double(), whole)),
            (ValueError, "expected as many inputs", lambda: world.reduce_scatter_tensor_coalesced([x], [])),
        ],
        "all_to_all": [
            (ValueError, "expected 2 inputs and outputs", lambda: world.alltoall(ranks[:1], parts)),
            (ValueError, same_memory, lambda: world.alltoall([shared] * r.size, parts)),
            (TypeError, "expected tensors of one dtype", lambda: world.alltoall(other, parts)),
            (ValueError, same_memory, lambda: world.alltoall_base(transposed, whole, [], [])),
            (ValueError, "multiple of 2 ranks", lambda: world.alltoall_base(torch.ones(3), torch.ones(3), [], [])),
        ],
        "broadcast": [(ValueError, same_memory, lambda: world.broadcast(shared, 1 - r.rank))],
        "reduce": [(ValueError, same_memory, lambda: world.reduce([shared], reducing))],
        "gather": [
            (ValueError, "expected .* outputs on rank", lambda: world.gather([_outs(r, N)[:1]], [x], gathering)),
            (ValueError, "expected a root", lambda: world.gather([ranks], [x], astray)),
        ],
        "scatter": [(ValueError, same_memory, lambda: world.scatter([shared], [], scattering))],
        "all_reduce": [(ValueError, same_memory, lambda: world.allreduce([shared]))],
    }


def _results(r, group, salt):
    """Returns the results of the good ops: outside blocks on gloo, in one block on lowcomm; a Work each is waited for."""
    outs = {}
    ops = _good(r, group, salt)
    if group is not None:
        for name, (out, call) in ops.items():
            if name == "all_to_all" and torch.__version__.startswith("2.11"):
                continue  # its gloo has no all_to_all of lists
            call().wait()
            outs[name] = out
        return outs
    with _block(async_ops=True) as block:
        works = [call() for _, call in ops.values()]
        assert not any(bits(out).any() for out, _ in [ops["all_gather"]] for out in out), "put off"
    block.wait()
    for work in works:
        work.wait()
        assert work.is_completed()
    return {name: out for name, (out, _) in ops.items()}


def test_the_results_are_gloos(r):
    r.init("lowcomm")
    gloo = dist.new_group(backend="gloo")
    for salt in range(3):
        got, want = _results(r, None, salt), _results(r, gloo, salt)
        for name in want:
            for ours, theirs in zip(got[name], want[name], strict=True):
                assert torch.equal(bits(ours), bits(theirs)), name
    check_group(r)


@pytest.mark.parametrize("policy", ["", OWN])
def test_a_mistake_in_a_block(r, policy):
    r.init("lowcomm", pg_options=options(policy))
    world = dist.group.WORLD
    for name, wrongs in _wrong(r).items():
        for kind, text, wrong in wrongs:
            for first in (False, True):
                got, step = torch.zeros(N * r.size), last_step()
                mine = torch.full((N,), float(r.rank + 1))
                with pytest.raises(kind, match=text), _block(async_ops=True):
                    works = [world._allgather_base(got, mine)] if first else []
                    works += [wrong(), dist.barrier(async_op=True), dist.broadcast(mine, 0, async_op=True)]
                assert world not in _world.pg_coalesce_state, name
                assert last_step() == step, "no numbers are taken"
                for work in works:
                    with pytest.raises(kind, match=text):
                        work.wait()
                    with pytest.raises(Exception, match=text):
                        work.get_future().wait()
                assert not got.any() and (mine == r.rank + 1).all(), f"{name}: nothing was started"
        with lc.exact():
            check_group(r)


def _wrongs(r):
    """Mistakes in dist's own calls, which wait."""
    return (
        lambda: dist.all_gather([torch.zeros(N)] * (r.size - 1), torch.ones(N)),
        lambda: dist.reduce(torch.zeros(1).expand(N), r.rank),
    )


def test_calls_that_wait_in_a_block(r):
    """dist's own calls wait inside the block: the error comes at its end all the same, after what was waited for."""
    r.init("lowcomm")
    for wrong in _wrongs(r):
        got = _outs(r)
        with pytest.raises(ValueError, match="lowcomm: (all_gather|reduce): expected"), _block():
            dist.all_gather(got, torch.full((N,), r.rank + 1.0))
            assert torch.equal(torch.stack(got), torch.arange(1.0, r.size + 1)[:, None].expand(r.size, N))
            wrong()
        assert dist.group.WORLD not in _world.pg_coalesce_state
        check_group(r)


def test_a_block_whose_body_raised(r):
    """A block whose body raised has no end: a mistake after it is raised by the next op at the latest, and mutes none."""
    r.init("lowcomm")
    for wrong in _wrongs(r):
        with pytest.raises(RuntimeError, match="the body's own"), _block():
            raise RuntimeError("the body's own")
        wrong()  # as in a block that is open still
        with pytest.raises(ValueError, match="lowcomm: (all_gather|reduce): expected"):
            dist.broadcast(torch.zeros(N), 0)
        _world.pg_coalesce_state.pop(dist.group.WORLD)  # torch keeps it
        got = _outs(r)
        dist.all_gather(got, torch.full((N,), r.rank + 1.0))
        assert [out[0].item() for out in got] == [1.0 + q for q in range(r.size)]
        check_group(r)


def test_an_op_that_fails_at_its_start_gives_back_its_residual(r):
    """A put-off op that fails at its start gives back the residual that it borrowed."""
    r.init("lowcomm")
    x = torch.ones(N)
    residual = lc.Residual(x)
    with pytest.raises(Exception, match="root"), _block(async_ops=True):
        dist.group.WORLD.reduce([torch.ones(4)], rooted(dist.ReduceOptions(), 9))
        lc.all_reduce(x, codec="sym8:bucket=64", residual=residual, async_op=True).wait()
    lc.all_reduce(x, codec="sym8:bucket=64", residual=residual)
    assert torch.allclose(x, torch.full((N,), float(r.size)), rtol=0.1)
    check_group(r)


def test_ops_of_which_torch_makes_one_call(r):
    """Ops of which torch makes one call at a block's end fail there, and the group's own block ends too."""
    r.init("lowcomm")
    shared, x = torch.zeros(1).expand(N), torch.ones(N)
    for kind, wrong in (
        (ValueError, lambda: dist.all_reduce(shared)),
        (ValueError, lambda: dist.all_gather_into_tensor(torch.zeros(3), x)),
        (TypeError, lambda: dist.all_gather_into_tensor(torch.zeros(N * r.size).double(), x)),
        (ValueError, lambda: dist.reduce_scatter_tensor(x, x)),
        (TypeError, lambda: dist.reduce_scatter_tensor(x.double(), torch.ones(N * r.size))),
    ):
        with pytest.raises(kind, match="lowcomm: "), _block():
            wrong()
        assert dist.group.WORLD not in _world.pg_coalesce_state
        # In a block that is still open a send that nobody waits for does not start.
        sent, got = dist.isend(torch.full((3,), r.rank + 1.0), 1 - r.rank), torch.zeros(3)
        dist.recv(got, 1 - r.rank)
        sent.wait()
        assert torch.equal(got, torch.full((3,), 2.0 - r.rank))
        check_group(r)
