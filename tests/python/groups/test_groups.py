"""How a group comes to be: registration, options, new groups, splits, meshes, device maps, DETAIL."""

import datetime
import os
import sys
import warnings

import collective_cases as cases
import pytest
import torch
import torch.distributed as dist
from collective_cases import Case, bits
from group_check import check_group

CPU = torch.device("cpu")


def _register_again():
    """Importing registers, after torch has or not, and so may anybody any number of times: without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import torch_lowcomm

        for _ in range(2):
            torch_lowcomm._torch_lowcomm_autoload.register()


@pytest.mark.later
@pytest.mark.on(2, start="spawn")
def test_known_without_an_import(r):
    assert "torch_lowcomm" not in sys.modules, "import torch alone must not import the package"
    assert "torch_lowcomm._C" not in sys.modules
    assert "LOWCOMM" in dist.Backend._plugins
    assert dist.is_backend_available("lowcomm")
    before = set(os.listdir("/proc/self/task"))
    _register_again()
    assert set(os.listdir("/proc/self/task")) == before, "registration starts no thread"
    r.init("lowcomm")
    check_group(r)
    assert dist.get_backend() == "lowcomm"
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.on(2, start="spawn", env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
def test_import_registers_where_torch_loads_no_plugins(r):
    assert "LOWCOMM" not in dist.Backend._plugins
    _register_again()
    r.init("lowcomm")
    check_group(r)
    dist.destroy_process_group()


def test_options(r):
    import torch_lowcomm as lc

    options = lc.Options(timeout=datetime.timedelta(seconds=50), min_bytes=1, seed=3, chunk_bytes=65536)
    shown = repr(options)
    assert "min_bytes=1" in shown and "seed=3" in shown
    r.init("lowcomm", pg_options=options)
    check_group(r)
    other = dist.new_group(list(range(r.size)), pg_options=options, timeout=datetime.timedelta(seconds=20))
    check_group(r, other)
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


@pytest.mark.on("quad")
def test_new_groups(r):
    r.init("lowcomm")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3], timeout=datetime.timedelta(seconds=30))]
    single = dist.new_group([r.rank], use_local_synchronization=True)
    check_group(r, single, [r.rank])
    members = [0, 1] if r.rank < 2 else [2, 3]
    check_group(r, pairs[r.rank // 2], members)
    backwards = dist.new_group([3, 1, 0], backend="lowcomm")
    if r.rank != 2:
        check_group(r, backwards, sorted([3, 1, 0]))
    other = dist.new_group(backend="gloo")
    check_group(r, other)
    check_group(r)
    # Many groups, one destroyed before the others.
    dist.destroy_process_group(pairs[r.rank // 2])
    check_group(r)
    more = [dist.new_group() for _ in range(5)]
    for group in reversed(more):
        check_group(r, group)


@pytest.mark.on("quad")
def test_split_group(r):
    r.init("lowcomm")
    check_group(r)
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


def test_children_take_the_living_policy(r):
    """Later groups take what their options leave unset from the living default group, or from who is split."""
    import torch_lowcomm as lc
    from torch_lowcomm.groups import backend_of

    def settings(group):
        backend = backend_of(group)
        return backend.policy, backend.min_bytes

    first, then, own = "all_gather=minmax8:bucket=64", "all_reduce=sym4:bucket=1024", "broadcast=qsgd8:bucket=64"
    r.init("lowcomm", pg_options=lc.Options(policy=first, min_bytes=1))
    assert settings(dist.new_group()) == (first, 1)
    lc.set_policy(then)
    world = dist.group.WORLD
    assert settings(dist.new_group()) == (then, 1)
    assert settings(dist.new_group(pg_options=lc.Options(policy=own))) == (own, 1)
    assert settings(dist.new_group(pg_options=lc.Options(policy="", min_bytes=7))) == ("", 7)
    assert settings(dist.new_group(pg_options=lc.Options(min_bytes=7))) == (then, 7)
    child = dist.new_group(pg_options=lc.Options(policy=own, min_bytes=9))
    given = child._get_backend(CPU).options
    assert settings(dist.new_group(pg_options=given)) == (own, 9), "options are taken as they are"
    children = [
        world.split_group([0, 1], group_name="living"),
        world.split_group([0, 1], group_name="own", opts=lc.Options(policy=own)),
    ]
    assert [child._get_backend(CPU).policy for child in children] == [then, own]
    lc.set_policy(world, first)
    again = world.split_group([0, 1], group_name="again")
    assert again._get_backend(CPU).policy == first
    x, out = torch.rand(500), torch.empty(1000)
    again._allgather_base(out, x).wait()
    assert torch.equal(out[500 * r.rank :][:500], lc.codec(first.partition("=")[2]).roundtrip(x))
    for child in (*children, again):
        child.shutdown()


def test_a_timeout_of_nothing_is_refused(r):
    for none in (0, -1):
        with pytest.raises(ValueError, match=r"timeout: expected more than 0, got"):
            r.init("lowcomm", timeout_s=none)
        if dist.is_initialized():
            dist.destroy_process_group()
    r.init("lowcomm")
    backend = dist.group.WORLD._get_backend(CPU)
    for none in (0, -1):
        with pytest.raises(ValueError, match=r"timeout: expected more than 0, got -?[01]\d* ms"):
            backend.set_timeout(datetime.timedelta(seconds=none))
    assert backend.options._timeout == datetime.timedelta(seconds=60)
    backend.set_timeout(datetime.timedelta(seconds=50))
    assert backend.options._timeout == datetime.timedelta(seconds=50)
    check_group(r)


@pytest.mark.on("quad")
def test_mesh_override(r):
    from torch.distributed.device_mesh import init_device_mesh

    import torch_lowcomm as lc

    r.init("gloo")
    override = {"dp": ("lowcomm", lc.Options(min_bytes=1)), "tp": "lowcomm"}
    mesh = init_device_mesh("cpu", (r.size // 2, 2), mesh_dim_names=("dp", "tp"), backend_override=override)
    for name in ("dp", "tp"):
        group = mesh.get_group(name)
        assert dist.get_backend(group) == "lowcomm", dist.get_backend(group)
        check_group(r, group, sorted(dist.get_process_group_ranks(group)))
    check_group(r)


@pytest.mark.parametrize("backend", ["cpu:lowcomm", "cpu:lowcomm,cuda:lowcomm", "lowcomm"])
def test_device_maps(r, backend):
    r.init(backend)
    check_group(r)
    assert type(dist.group.WORLD._get_backend(CPU)).__name__ == "LowcommBackend"
    check_group(r, dist.new_group())


@pytest.mark.on(2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, timeout=90)
def test_debug_detail(r):
    r.init("lowcomm")
    check_group(r)
    for collective in (cases.all_gather, cases.reduce_scatter, cases.all_gather_into_tensor, cases.all_to_all_single):
        results = [collective(Case(g, r.rank, r.size)) for g in (dist.group.WORLD, dist.new_group(backend="gloo"))]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*results, strict=True)), collective.__name__
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    # The purpose of the mode: ranks that call different ops learn it.
    with pytest.raises(RuntimeError, match="Collectives differ|collective"):
        dist.all_reduce(torch.ones(2)) if r.rank == 0 else dist.all_gather_into_tensor(torch.ones(4), torch.ones(2))
