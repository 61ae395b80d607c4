"""A group from birth to exit: options, children, time-outs, abort, forks, leaks, launchers."""

import datetime
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time

import collective_cases as cases
import pytest
import ranks
import torch
import torch.distributed as dist
from collective_cases import Case, bits

CPU = torch.device("cpu")


def _works(r, group=None, members=None):
    """The ops lowcomm does itself and one of gloo's, on a group; every result checked."""
    members = list(range(r.size)) if members is None else members
    n, me = len(members), members.index(r.rank)
    out = torch.empty(3 * n)
    dist.all_gather_into_tensor(out, torch.full((3,), float(r.rank)), group=group)
    assert torch.equal(out, torch.tensor(members, dtype=torch.float32).repeat_interleave(3)), out
    mine = torch.empty(2)
    dist.reduce_scatter_tensor(mine, torch.arange(2.0 * n), group=group)
    assert torch.equal(mine, n * torch.arange(2.0 * me, 2.0 * me + 2)), mine
    t = torch.ones(4)
    dist.all_reduce(t, group=group)
    assert torch.equal(t, torch.full((4,), float(n))), t


# ---- registration ------------------------------------------------------------------------------------------------


def _registered(r):
    assert "torch_lowcomm" not in sys.modules, "import torch alone must not import the package"
    assert "torch_lowcomm._C" not in sys.modules
    assert "LOWCOMM" in dist.Backend._plugins
    assert dist.is_backend_available("lowcomm")
    before = set(os.listdir("/proc/self/task"))
    import torch_lowcomm  # noqa: F401

    assert set(os.listdir("/proc/self/task")) == before, "registration starts no thread"
    r.init("lowcomm")
    _works(r)
    assert dist.get_backend() == "lowcomm"
    dist.destroy_process_group()


def _registered_by_import(r):
    assert "LOWCOMM" not in dist.Backend._plugins
    import torch_lowcomm

    torch_lowcomm._torch_lowcomm_autoload.register()  # any number of times
    r.init("lowcomm")
    _works(r)
    dist.destroy_process_group()


def test_known_without_an_import():
    ranks.run_ranks(_registered, 2, start="spawn")


def test_import_registers_where_torch_loads_no_plugins():
    ranks.run_ranks(_registered_by_import, 2, start="spawn", env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


# ---- options and kinds of groups -----------------------------------------------------------------------------------


def _options(r):
    import torch_lowcomm as lc

    options = lc.Options(timeout=datetime.timedelta(seconds=50), min_bytes=1, seed=3, chunk_bytes=65536)
    shown = repr(options)
    r.init("lowcomm", pg_options=options)
    _works(r)
    other = dist.new_group(list(range(r.size)), pg_options=options, timeout=datetime.timedelta(seconds=20))
    _works(r, other)
    assert repr(options) == shown, "a group must copy the options it is given"
    assert (options.min_bytes, options.seed, options.chunk_bytes, options.policy) == (1, 3, 65536, None)
    backend = dist.group.WORLD._get_backend(CPU)
    assert backend.options._timeout == datetime.timedelta(seconds=50)
    with pytest.raises(AttributeError):
        options.seed = 4
    with pytest.raises(TypeError, match="bits"):
        lc.Options(bits=4)
    with pytest.raises(TypeError, match=r"pg_options.*expected.*Options.*got"):
        dist.new_group(backend="lowcomm", pg_options={"policy": ""})


def _new_groups(r):
    r.init("lowcomm")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3], timeout=datetime.timedelta(seconds=30))]
    single = dist.new_group([r.rank], use_local_synchronization=True)
    _works(r, single, [r.rank])
    members = [0, 1] if r.rank < 2 else [2, 3]
    _works(r, pairs[r.rank // 2], members)
    backwards = dist.new_group([3, 1, 0], backend="lowcomm")
    if r.rank != 2:
        _works(r, backwards, sorted([3, 1, 0]))
    beside = dist.new_group(backend="gloo")
    _works(r, beside)
    _works(r)
    # Many groups, one destroyed before the others.
    dist.destroy_process_group(pairs[r.rank // 2])
    _works(r)
    more = [dist.new_group() for _ in range(5)]
    for group in reversed(more):
        _works(r, group)


def _split(r):
    r.init("lowcomm")
    _works(r)
    members = [0, 1] if r.rank < 2 else [2, 3]
    child = dist.group.WORLD.split_group(members, group_name=f"half{members[0]}", group_desc="half")
    assert child.size() == 2
    assert child.rank() == members.index(r.rank)
    assert type(child._get_backend(CPU)).__name__ == type(dist.group.WORLD._get_backend(CPU)).__name__
    t = torch.full((3,), float(r.rank))
    child.allreduce([t]).wait()
    assert torch.equal(t, torch.full((3,), float(sum(members))))
    out = torch.empty(4)
    child._allgather_base(out, torch.full((2,), float(r.rank))).wait()
    assert torch.equal(out, torch.tensor(members, dtype=torch.float32).repeat_interleave(2))
    child.shutdown()


def _mesh(r):
    from torch.distributed.device_mesh import init_device_mesh

    import torch_lowcomm as lc

    r.init("gloo")
    override = {"dp": ("lowcomm", lc.Options(min_bytes=1)), "tp": "lowcomm"}
    mesh = init_device_mesh("cpu", (r.size // 2, 2), mesh_dim_names=("dp", "tp"), backend_override=override)
    for name in ("dp", "tp"):
        group = mesh.get_group(name)
        assert dist.get_backend(group) == "lowcomm", dist.get_backend(group)
        _works(r, group, sorted(dist.get_process_group_ranks(group)))
    _works(r)


def _device_map(r, backend):
    r.init(backend)
    _works(r)
    assert type(dist.group.WORLD._get_backend(CPU)).__name__ == "LowcommBackend"
    _works(r, dist.new_group())


def test_options(pair):
    pair(_options)


def test_new_groups(quad):
    quad(_new_groups)


def test_split_group(quad):
    quad(_split)


def test_mesh_override(quad):
    quad(_mesh)


@pytest.mark.parametrize("backend", ["cpu:lowcomm", "cpu:lowcomm,cuda:lowcomm", "lowcomm"])
def test_device_maps(pair, backend):
    pair(_device_map, backend)


def _detail(r):
    r.init("lowcomm")
    _works(r)
    for collective in (cases.all_gather, cases.reduce_scatter, cases.all_gather_into_tensor, cases.all_to_all_single):
        results = [collective(Case(g, r.rank, r.size)) for g in (dist.group.WORLD, dist.new_group(backend="gloo"))]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*results, strict=True)), collective.__name__
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    # What the mode is for: ranks that call different ops learn it.
    with pytest.raises(RuntimeError, match="Collectives differ|collective"):
        dist.all_reduce(torch.ones(2)) if r.rank == 0 else dist.all_gather_into_tensor(torch.ones(4), torch.ones(2))


def test_debug_detail():
    ranks.run_ranks(_detail, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, timeout=90)


# ---- time-outs, abort, shutdown ------------------------------------------------------------------------------------


def _timeout(r, how):
    """The last rank stays out of an op; the others fail near the group's time-out, and say which and whom."""
    r.init("lowcomm", timeout_s=60 if how == "set_timeout" else 2)
    group = dist.group.WORLD
    _works(r)
    if how == "new_group":
        group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    if how == "set_timeout":
        group.set_timeout(datetime.timedelta(seconds=2))
    if r.rank == r.size - 1:
        r.hear("done0")
        return
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="all_gather") as failure:
        dist.all_gather_into_tensor(torch.empty(3 * r.size), torch.ones(3), group=group)
    assert 1.5 < time.monotonic() - start < 20, time.monotonic() - start
    assert f"rank {r.size - 1}" in str(failure.value), failure.value
    r.say(f"done{r.rank}")


@pytest.mark.parametrize("how", ["init", "new_group", "set_timeout"])
def test_timeouts(how):
    ranks.run_ranks(_timeout, 2, how)


def _abort(r, how):
    r.init("lowcomm")
    group = dist.group.WORLD
    _works(r)
    if r.rank != 0:
        r.hear("aborted")
        return
    work = dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * r.size), async_op=True)
    time.sleep(0.1)
    assert not work.is_completed()
    start = time.monotonic()
    if how == "thread":
        threading.Timer(0.3, group.abort).start()
    else:
        group.abort()
    with pytest.raises(dist.DistBackendError, match="reduce_scatter"):
        work.wait()
    assert time.monotonic() - start < 10
    if how == "twice":
        group.abort()
    with pytest.raises(dist.DistBackendError):
        dist.all_gather_into_tensor(torch.empty(3 * r.size), torch.ones(3))
    r.say("aborted")


@pytest.mark.parametrize("how", ["thread", "once", "twice"])
def test_abort_ends_what_waits(how):
    ranks.run_ranks(_abort, 2, how)


def _shutdown(r):
    r.init("lowcomm")
    group = dist.group.WORLD
    out = torch.empty(3 * r.size)
    work = dist.all_gather_into_tensor(out, torch.ones(3), async_op=True)
    work.wait()
    dist.barrier()
    group.shutdown()
    group.shutdown()
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather_into_tensor(out, torch.ones(3))
    dist.destroy_process_group()
    r.init("lowcomm")
    _works(r)
    dist.destroy_process_group()


def test_shutdown_twice():
    ranks.run_ranks(_shutdown, 2)


def _pending_destroy(r):
    """Destroying waits for what is queued, and the results are there after it."""
    r.init("lowcomm")
    outs = [torch.empty(10_000 * r.size) for _ in range(20)]
    works = [dist.all_gather_into_tensor(o, torch.full((10_000,), float(k)), async_op=True) for k, o in enumerate(outs)]
    dist.destroy_process_group()
    for k, (work, out) in enumerate(zip(works, outs, strict=True)):
        work.wait()
        assert torch.equal(out, torch.full_like(out, float(k))), k


def test_destroy_drains_the_queue():
    for _ in range(5):
        ranks.run_ranks(_pending_destroy, 2)


def _reused_names(r):
    """Names of groups come back after a destroy: a later group must never be taken for one that is still referred to."""
    import torch_lowcomm as lc

    r.init("lowcomm")
    groups = [dist.group.WORLD, dist.new_group()]
    for group in groups:
        _works(r, group)
    names = [group.group_name for group in groups]
    held = groups, [group._get_backend(CPU) for group in groups]
    assert set(names) <= set(lc.stats())
    dist.destroy_process_group()
    assert not set(names) & set(lc.stats()), "a group that was destroyed is still counted"
    r.init("gloo")
    groups = [dist.group.WORLD, dist.new_group()]
    assert [group.group_name for group in groups] == names
    for group in groups:
        for call in (lambda group=group: lc.set_policy(group, ""), lambda group=group: lc.stats(group)):
            with pytest.raises(ValueError, match="lowcomm"):
                call()
    dist.destroy_process_group()
    r.init("lowcomm")
    lc.set_policy(None, "all_gather=minmax8")
    _works(r)
    del held


def test_a_dead_groups_name_means_nothing(pair):
    pair(_reused_names)


# ---- exits ---------------------------------------------------------------------------------------------------------

_kept = []  # objects that live until the interpreter ends


def _exit(r, how):
    r.init("lowcomm")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    _works(r)
    if how == "works kept":
        _kept.append(dist.all_gather_into_tensor(torch.empty(3 * r.size), torch.ones(3), async_op=True))
        _kept.append(dist.all_reduce(torch.ones(3), async_op=True))
        _kept.append(_kept[0].get_future().then(lambda f: f.value()))
        for work in _kept[:2]:
            work.wait()
    if how == "group kept":
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()
    if how == "backend kept":
        _kept.append(dist.group.WORLD._get_backend(CPU))
    if how == "one destroys" and r.rank == 0:
        dist.destroy_process_group()
    if how == "late rank" and r.rank == 1:
        time.sleep(0.5)
    if how == "destroy":
        dist.destroy_process_group()
    if how == "exception":
        try:
            raise RuntimeError("a frame that holds the model")
        except RuntimeError as e:
            _kept.append(e)
    return how


@pytest.mark.parametrize(
    "how",
    ["destroy", "no destroy", "works kept", "group kept", "backend kept", "one destroys", "late rank", "exception"],
)
def test_clean_exit(how):
    for _ in range(3):
        assert ranks.run_ranks(_exit, 2, how) == [how] * 2


@pytest.mark.parametrize("how", ["destroy", "no destroy"])
def test_clean_exit_of_fresh_interpreters(how):
    assert ranks.run_ranks(_exit, 2, how, start="spawn") == [how] * 2


def _ddp(r):
    r.init("lowcomm")
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


def test_ddp_exits_cleanly_twelve_of_twelve():
    """Plain gloo aborts in about one of five such runs."""
    for _ in range(12):
        ranks.run_ranks(_ddp, 2)


# ---- forks, leaks ----------------------------------------------------------------------------------------------------


def _forked(r, folder):
    import torch_lowcomm  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
    processes = []
    for rank in range(2):
        context = multiprocessing.get_context("fork")
        processes.append(context.Process(target=_fork_child, args=(ranks.Rank(rank, 2, folder),)))
        processes[-1].start()
    for process in processes:
        process.join(40)
    return [process.exitcode for process in processes]


def _fork_child(r):
    r.init("lowcomm")
    _works(r)
    dist.destroy_process_group()


def test_ranks_may_be_forked(tmp_path):
    """The package is imported, registered, and then the process forks its ranks."""
    assert ranks.run_ranks(_forked, 1, str(tmp_path), start="spawn") == [[0, 0]]


def _data_loader(r):
    """A loader's workers are forks of a process with a living group: they leave it alone."""
    r.init("lowcomm")
    _works(r)
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        t = batch.clone()
        dist.all_reduce(t)
        assert torch.equal(t, batch * r.size)
        out = torch.empty(2 * r.size, dtype=batch.dtype)
        dist.all_gather_into_tensor(out, batch)
    dist.destroy_process_group()


def test_a_process_with_a_group_may_fork_workers():
    ranks.run_ranks(_data_loader, 2)


def _open_things():
    gc.collect()
    descriptors = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            descriptors[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
    return len(os.listdir("/proc/self/task")), descriptors


def _again_and_again(r, rounds):
    counts = []
    for _ in range(rounds):
        r.init("lowcomm")
        _works(r)
        _works(r, dist.new_group())
        dist.destroy_process_group()
        time.sleep(0.01)
        threads, descriptors = _open_things()
        counts.append((threads, len(descriptors)))
    return counts, sorted(descriptors.values())


def test_repeated_groups_leak_nothing():
    for counts, descriptors in ranks.run_ranks(_again_and_again, 2, 20, timeout=120):
        settled = counts[3]
        assert all(c[0] <= settled[0] for c in counts[3:]), f"threads after each round: {[c[0] for c in counts]}"
        assert all(c[1] <= settled[1] for c in counts[3:]), f"descriptors: {[c[1] for c in counts]}: {descriptors}"


# ---- launchers -------------------------------------------------------------------------------------------------------

_SCRIPT = """
import os, sys
import torch, torch.distributed as dist
assert __name__ == "__main__"
dist.init_process_group("gloo")
group = dist.group.WORLD
out = torch.empty(dist.get_world_size())
dist.all_gather_into_tensor(out, torch.full((1,), float(dist.get_rank())))
part = dist.new_group([0, 1], backend="gloo")
t = torch.ones(2)
dist.all_reduce(t, group=part)
kinds = [type(g._get_backend(torch.device("cpu"))).__name__ for g in (group, part)]
with open(f"{sys.argv[2]}/said{dist.get_rank()}", "w") as f:
    f.write(f"{dist.get_backend()} {kinds} {out.tolist()} {t.tolist()} {sys.argv[1:2]} {os.path.basename(__file__)}")
dist.barrier()
dist.destroy_process_group()
sys.exit(int(sys.argv[1] == "fail") * 3)
"""


@pytest.mark.parametrize("word", ["plain", "fail"])
def test_run_puts_a_gloo_script_on_lowcomm(tmp_path, word):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    code, text = ranks.run_command(
        [*launcher, "-m", "torch_lowcomm", "run", script, word, tmp_path], timeout=90, cwd=tmp_path
    )
    assert (code != 0) == (word == "fail"), text
    kinds = ["LowcommBackend", "LowcommBackend"]
    for rank in range(2):
        said = (tmp_path / f"said{rank}").read_text()
        assert said == f"gloo {kinds} [0.0, 1.0] [2.0, 2.0] {[word]} train.py", said


def test_info_runs_a_self_test(tmp_path):
    code, text = ranks.run_command([sys.executable, "-m", "torch_lowcomm", "info"], timeout=90, cwd=tmp_path)
    assert code == 0, text
    assert torch.__version__ in text
    assert re.search("scalar|avx2|avx512", text), text
    assert "gloo" in text


def test_a_second_registration_is_harmless():
    code = "import torch, torch_lowcomm, _torch_lowcomm_autoload as a; a.register(); a.register(); print('fine')"
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "fine", out.stderr
