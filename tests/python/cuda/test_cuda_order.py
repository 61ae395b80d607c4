"""CUDA tensors and who waits for whom. On a GPU two ranks share it (gloo carries what is exact); without one, what is the
same on any device that is not the host.
"""

import time

import pytest
import ranks
import torch
import torch.distributed as dist
from compressed_by_hand import options
from fsdp_model import batch, loss_of, make_model, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_lowcomm.fsdp import overlap
from torch_lowcomm.fsdp.comms import QuantizedAllGather


def on_a_gpu(test):
    test = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test)
    return pytest.mark.cuda(test)


class _Carrier:
    """Moves nothing, and says that it will."""

    def all_gather_layout(self, output, _input, _layout, **_):
        self.work = object()
        self.output = output
        return self.work


class _Levels:
    layout = type("Layout", (), {"elements": 8})

    def at(self, *_):
        return self.layout


class _Group:
    group_name = "g"


def test_a_gather_returns_its_work_on_any_device():
    carrier = _Carrier()
    gather = QuantizedAllGather(_Group, _Levels(), 0, list, overlap=True, carrier=carrier)
    elements = torch.empty(8, device="meta")
    assert gather(elements.new_empty(16), elements, _Group) is carrier.work


def test_a_reduction_is_deferred_on_any_device(monkeypatch):
    monkeypatch.setattr(overlap.fsdp2, "in_backward", lambda: True)
    monkeypatch.setattr(overlap.fsdp2, "at_end_of_backward", lambda *_: None)
    waited = []
    work = type("Work", (), {"wait": lambda _: waited.append(1)})()
    group = type("Group", (), {"only_stores_reduced": lambda *_: True, "take_gradients": lambda _: []})()
    deferred = overlap.DeferredReductions()
    module = overlap.ModuleReductions(deferred, group)
    assert module.take(work, torch.empty(4, device="meta"), dist.ReduceOp.AVG)
    assert not waited
    deferred.wait()
    assert waited


def _exact_and_coded(r):
    """Works and futures of exact and coded ops, asked in every way, while the stream they came from is late."""
    torch.cuda.set_device(0)
    r.init("lowcomm", pg_options=options("all_reduce=fp16", nccl=False))
    n = 1 << 20
    for _ in range(3):
        for ask in ("wait", "future", "then", "poll", "collect"):
            for dtype in (torch.float32, torch.int32):  # coded, exact
                x = torch.zeros(n, dtype=dtype, device="cuda")
                torch.cuda._sleep(50_000_000)
                x += r.rank + 1
                work = dist.all_reduce(x, async_op=True)
                y = None
                if ask == "wait":
                    work.wait()
                elif ask == "future":
                    work.get_future().wait()
                elif ask == "then":
                    y = work.get_future().then(lambda f: f.value()[0] * 2).wait() / 2
                elif ask == "collect":
                    torch.futures.collect_all([work.get_future()]).wait()
                    work.wait()
                else:
                    while not work.is_completed():
                        time.sleep(0.001)
                    assert work.is_success()
                    if dtype == torch.int32:
                        work.wait()  # gloo's copies
                assert bool((x == 3).all()), (ask, dtype)
                assert y is None or bool((y == 3).all()), (ask, dtype)


@on_a_gpu
def test_whoever_asks_gets_the_sum():
    ranks.run_ranks(_exact_and_coded, 2, start="spawn", timeout=300)


def _ddp(r):
    """Gradients given: those of the GPU are those of the host, to the bit, however late the hook's copies are."""
    import torch_lowcomm as lc

    torch.cuda.set_device(0)
    r.init("lowcomm", pg_options=options("", nccl=False))
    for form in ({}, {"error_feedback": False}, {"rank": 4}):
        results = []
        for device in ("cpu", "cuda"):
            generator = torch.Generator().manual_seed(r.rank)
            model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).to(device)
            for p in model.parameters():
                torch.nn.init.constant_(p, 0.01)
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
            model.register_comm_hook(lc.ddp.State(codec="sym4:bucket=128", **form), lc.ddp.hook)
            got = []
            for _ in range(3):
                given = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
                model.zero_grad()
                loss = sum((p * g.to(device)).sum() for p, g in zip(model.parameters(), given, strict=True))
                (model(torch.zeros(1, 512, device=device)).sum() * 0 + loss).backward()
                got += [p.grad.cpu() for p in model.parameters()]
            results.append(got)
        for host, there in zip(*results, strict=True):
            assert torch.equal(host, there), form


@on_a_gpu
def test_ddp_gradients_are_the_hosts():
    ranks.run_ranks(_ddp, 2, start="spawn", timeout=300)


def _captured(r):
    torch.cuda.set_device(0)
    r.init("lowcomm", pg_options=options("all_reduce=fp16", nccl=False))
    x = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2
        for tensor in (y, y.to(torch.int32)):
            with pytest.raises(ValueError, match="captures a CUDA graph"):
                dist.all_reduce(tensor)
    graph.replay()
    dist.all_reduce(x)
    assert bool((x == 2).all())


@on_a_gpu
def test_a_capture_is_refused_in_words():
    ranks.run_ranks(_captured, 2, start="spawn", timeout=120)


def _fsdp(r):
    """The bits of a model with overlap are those without."""
    import torch_lowcomm as lc

    torch.cuda.set_device(0)
    results = []
    for overlapped in (False, True):
        r.init("lowcomm", pg_options=options("", nccl=False))
        model, mesh = make_model(3).to("cuda"), init_device_mesh("cuda", (r.size,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        lc.fsdp.quantize(model, weights="sym8:bucket=256", gradients="sym8:bucket=256", overlap=overlapped)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for k in range(8):
            loss_of(model, batch(r.rank, k).cuda()).backward()
            if k % 2:  # two micro-batches a step
                optimizer.step()
                optimizer.zero_grad()
        results.append(whole(model))
        dist.destroy_process_group()
    for name, t in results[0].items():
        assert torch.equal(t.cpu(), results[1][name].cpu()), name


@on_a_gpu
def test_fsdp_with_overlap_has_the_bits_without():
    ranks.run_ranks(_fsdp, 2, start="spawn", timeout=300)
