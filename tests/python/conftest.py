"""Shared fixtures: ranks that stay up for the session, the zygote that forks all others, a store for machines."""

import collections
import functools
import inspect
import os
import sys
from pathlib import Path

# A thread for each worker, and for what it starts: workers are as many as cores, and OpenMP's threads spin where they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import ranks
import torch.distributed as dist

# As `python benchmarks` has it: a program, and the examples whose models and texts it uses.
sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "examples")]


def pytest_configure(config):
    config.addinivalue_line("markers", "on: pools, or numbers of fresh ranks, that do the test; a timeout and the like")


def pytest_collection_modifyitems(config, items):
    """The slow tests come first in each worker's part: at the end others can take over nothing from a worker in one of them."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    slow = [item for item in items if item.get_closest_marker("slow")]
    quick = [item for item in items if not item.get_closest_marker("slow")]
    del items[:]
    for worker in range(workers):
        for kind in (slow, quick):
            items += kind[worker * len(kind) // workers : (worker + 1) * len(kind) // workers]


def pytest_terminal_summary(terminalreporter):
    """Says how many tests passed, by folder; what was not run, and why."""
    passed = terminalreporter.stats.get("passed", [])
    folders = collections.Counter(Path(report.nodeid.partition("::")[0]).parent.name for report in passed)
    if len(folders) > 1:
        terminalreporter.section("passed")
        terminalreporter.write_line(", ".join(f"{folder} {count}" for folder, count in sorted(folders.items())))
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(str(report.longrepr[-1]).removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("not run")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count:5} {reason}")


@pytest.fixture(scope="session", autouse=True)
def _zygote():
    yield
    ranks.close_zygote()


def _pool(size):
    pool = ranks.Pool(size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pair(_zygote):
    """Two ranks: `pair(fn, *args, timeout=60)` runs `fn(Rank, *args)` on both and returns their values."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def trio(_zygote):
    """Three ranks: the fewest with one that a fault between two others reaches at second hand."""
    yield from _pool(3)


@pytest.fixture(scope="session")
def quad(_zygote):
    """Four ranks."""
    yield from _pool(4)


@pytest.fixture
def r(request):
    """A test whose first parameter it is runs on each rank with its `Rank`: on `pair`, or where the mark `on` says.

    The mark's arguments are pools ("pair", "trio", "quad") or numbers of fresh processes; the test runs on each in turn. With
    `alike` the ranks must return the same. Other keyword arguments are those of the pool's call (`group=`) or of `run_ranks`.
    """
    mark = request.node.get_closest_marker("on")
    where = mark.args if mark else ("pair",)
    return [functools.partial(_fresh, n) if isinstance(n, int) else request.getfixturevalue(n) for n in where]


def _fresh(size, fn, *args, **options):
    return ranks.run_ranks(fn, size, *args, **options)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Has the ranks of the fixture `r` do the test, with its other arguments and the options of the mark `on`."""
    if "r" not in pyfuncitem.funcargs:
        return None
    _, *others = inspect.signature(pyfuncitem.obj).parameters
    arguments = [pyfuncitem.funcargs[name] for name in others]
    mark = pyfuncitem.get_closest_marker("on")
    options = dict(mark.kwargs) if mark else {}
    alike = options.pop("alike", False)
    for run in pyfuncitem.funcargs["r"]:
        found = run(pyfuncitem.obj, *arguments, **options)
        if alike:
            ranks.expect_alike(found)
    return True


@pytest.fixture
def store():
    """The store that outlives all machines."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def port(store):
    """That of the store, for ranks that reach it by themselves."""
    return store.port
