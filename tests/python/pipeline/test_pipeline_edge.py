"""Hand-written pipelines over lc.pipeline.Edge: exact gradients, equal caches, errors on both ends."""

import itertools

import pytest
import stages_case as case
import torch
import torch.distributed as dist

import torch_lowcomm as lc


def _edges(r, **options):
    """This rank's ends of the edges to the stages before and behind it, by rank."""
    return {peer: lc.pipeline.Edge(peer, **options) for peer in (r.rank - 1, r.rank + 1) if 0 <= peer < r.size}


def _step(r, edges, stage, x, y, order, samples=None):
    """One step of all micro-batches by hand, forward before backward; backward in `order`."""
    parts = [None] * case.MICRO if samples is None else samples.chunk(case.MICRO)
    ends = []
    for part, target, numbers in zip(x.chunk(case.MICRO), y.chunk(case.MICRO), parts, strict=True):
        if r.rank > 0:
            part = edges[r.rank - 1].recv(torch.empty_like(part), samples=numbers)
        result = stage(part)
        if r.rank + 1 < r.size:
            ends.append(edges[r.rank + 1].send(result, samples=numbers))
        else:
            ends.append(case.loss(result, target) / case.MICRO)
    if order == "together":
        torch.stack(ends).sum().backward()
    for end in ends if order == "forward" else reversed(ends) if order == "backward" else ():
        end.backward()
    for edge in edges.values():
        edge.finish()


@pytest.mark.on("quad", group={})
def test_the_whole_models_gradients_on_four_ranks(r):
    x, y = case.batch()
    want, stage = case.exact_gradients(r.size, x, y)[r.rank], case.module(r.rank)
    edges = _edges(r)
    for order in ("forward", "backward", "together"):
        stage.zero_grad()
        _step(r, edges, stage, x, y, order)
        for mine, whole in zip(stage.parameters(), want, strict=True):
            torch.testing.assert_close(mine.grad, whole, rtol=1e-5, atol=1e-7)


def _rows(cache, peer, sends):
    """What the end of edge 0 to a peer remembers, as Slots.rows."""
    return cache.slots.rows(lc.pipeline.edge.slot_of(peer, 0), sends).tolist()


@pytest.mark.on("quad", group={})
def test_both_ends_remember_the_same(r):
    cache = lc.pipeline.Cache()
    stage, edges = case.module(r.rank), _edges(r, cache=cache, **case.CODED)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    for samples, x, y in lc.pipeline.batches(case.data(), batch=case.ROWS, epochs=3):
        _step(r, edges, stage, x, y, "forward", samples)
        optimizer.step()
        optimizer.zero_grad()
    rows = case.gathered([_rows(cache, r.rank + 1, True), _rows(cache, r.rank - 1, False)])
    for (sent, _), (_, received) in itertools.pairwise(rows):
        assert sent == received
        assert [row[2] for row in sent] == [3] * case.SAMPLES
    figures = lc.stats()[dist.group.WORLD.group_name]
    if r.rank == 0:
        assert figures["send forward edge 0"]["samples"]["seen"] == 2 * case.SAMPLES
        assert figures["recv backward edge 0"]["calls"] == 3 * case.SAMPLES // case.ROWS * case.MICRO


@pytest.mark.on("pair", group={})
def test_several_tensors_and_evaluation(r):
    """Three tensors: two floats of which one is unused in the loss, one of integers; receives posted ahead; evaluation."""
    edge = lc.pipeline.Edge(1 - r.rank, 7)
    weight = torch.arange(6.0).view(2, 3).requires_grad_()
    numbers = torch.tensor([[3], [4]])
    if r.rank == 0:
        sent = [edge.send([weight * 2, numbers, weight + 1]) for _ in range(2)]
        (sent[0] + sent[1]).backward()
        assert torch.equal(weight.grad, 2 * 2 * numbers.expand(2, 3).float())
        with torch.no_grad():
            assert not edge.send(weight).requires_grad
    else:
        like = [torch.empty(2, 3), torch.empty(2, 1, dtype=torch.int64), torch.empty(2, 3)]
        edge.post(like)
        edge.post(like)
        with pytest.raises(ValueError, match=r"edge 7 to rank 0: expected recv\(\) without arguments for the 2 posted"):
            edge.recv(like)
        for _ in range(2):
            doubled, got, _unused = edge.recv()
            assert torch.equal(doubled, 2 * weight) and torch.equal(got, numbers)
            assert not got.requires_grad
            (doubled * got).sum().backward()
        with torch.no_grad():
            assert torch.equal(edge.recv(like[0]), weight)
        with pytest.raises(ValueError, match="or none posted and `like`, got none"):
            edge.recv()
    edge.finish()


@pytest.mark.on("pair", group={})
def test_errors_reach_both_ends_and_both_go_on(r):
    cache = lc.pipeline.Cache()
    edge = lc.pipeline.Edge(1 - r.rank, cache=cache, **case.CODED)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def step(spoilt, gradient, samples=(0, 1, 2, 3)):
        if r.rank == 0:
            edge.send(x * spoilt, samples=samples).backward()
            edge.finish()
        else:
            y = edge.recv(torch.empty(4, 8), samples=samples)
            (y * gradient).sum().backward()
            edge.finish()

    def equal():
        rows = case.gathered(_rows(cache, 1 - r.rank, r.rank == 0))
        assert rows[0] == rows[1] and len(rows[0]) == 4

    with pytest.raises(ValueError, match="expected samples= with a cache, and none without, got no samples with one"):
        edge.send(x) if r.rank == 0 else edge.recv(x)
    step(1, 1)
    nan = float("nan")
    for spoilt, gradient in ((nan, 1), (1, nan)):
        with pytest.raises((ValueError, dist.DistBackendError), match="(?i)edge 0.*nan"):
            step(spoilt, gradient)
        with pytest.raises(dist.DistBackendError, match="(?i)withdrawn.*nan"):
            step(1, 1)
        edge.reset()
        equal()
        step(1, 1)
        equal()
    with pytest.raises(dist.DistBackendError, match="samples differs"):
        step(1, 1, range(4 * r.rank, 4 * r.rank + 4))
    edge.reset()
    if r.rank == 0:
        edge.fail("the data has ended")
    else:
        with pytest.raises(dist.DistBackendError, match="withdrawn: the data has ended"):
            edge.recv(torch.empty(4, 8), samples=range(4))
    edge.reset()
    step(1, 1)
    equal()
    for options, said in (
        ({"channel": 255}, "channel: expected one of 0...254, got 255"),
        ({"cache": cache}, "forward: expected a codec of changes with a cache, got None"),
        ({"cache": True}, "cache: expected an lc.pipeline.Cache, got True"),
        ({"peer": r.rank}, "expected a peer among"),
    ):
        with pytest.raises(TypeError if options.get("cache") is True else ValueError, match=said):
            lc.pipeline.Edge(**{"peer": 1 - r.rank, **options})
    with pytest.raises(ValueError, match="expected 1 to 8 tensors in a message, got 9"):
        edge.send([x] * 9, samples=range(4))
    dist.destroy_process_group()


@pytest.mark.on("pair", group={"timeout_s": 300})  # longer than the test's: nothing here is heard by a time-out
def test_ends_that_differ_in_gradients_are_named(r):
    """One end with gradients and one without: both hear of it with the message, and go on after a reset."""
    edge = lc.pipeline.Edge(1 - r.rank)
    x = torch.ones(3, 5, requires_grad=True)
    for with_gradients in (0, 1):
        with torch.set_grad_enabled(r.rank == with_gradients):
            with pytest.raises(RuntimeError) as failure:
                if r.rank == 0:
                    sent = edge.send(2 * x)
                    sent.backward() if with_gradients == 0 else edge.finish()
                else:
                    edge.recv(torch.empty(3, 5))
        sender, receiver = ("comes back", "none") if with_gradients == 0 else ("none", "comes back")
        assert f"gradient differs: rank 0 has '{sender}', rank 1 has '{receiver}'" in str(failure.value), failure.value
        edge.reset()
        if r.rank == 0:
            edge.send(2 * x).backward()
            assert torch.equal(x.grad, torch.full((3, 5), 6.0))
            x.grad = None
        else:
            (3 * edge.recv(torch.empty(3, 5))).sum().backward()
        edge.finish()
