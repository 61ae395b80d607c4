"""Tests whose function runs on the ranks."""

import functools
import inspect

from ranks.job import run_ranks


def _equal(a, b):
    """Whether two nests of lists, tuples and tensors are equal."""
    import torch  # not where a rank of a fresh interpreter has its environment to set first

    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b


def on_ranks(where, *, group=(), alike=False, **options):
    """Makes `fn(Rank, *arguments)` a test that runs on every rank; its other parameters are the test's.

    Args:
        where: "pair", "trio" or "quad", the fixture with ranks that stay; or the number of fresh processes.
        group: How the ranks that stay make the process group in which the test begins: keyword arguments of `Rank.init`;
            None if the test makes its own, as fresh processes do.
        alike: Whether all ranks must return the same, except for those that return None or are killed.
        options: Those of the fixture's call or of `run_ranks`, as `timeout`.
    """

    def make(fn):
        names = list(inspect.signature(fn).parameters)[1:]

        @functools.wraps(fn)
        def test(*rank_and_arguments, **given):
            if rank_and_arguments:  # on a rank, which finds the test by its name
                if isinstance(where, str) and group is not None:
                    rank_and_arguments[0].init(**dict(group))
                return fn(*rank_and_arguments)
            arguments = [given[name] for name in names]
            if isinstance(where, int):
                found = run_ranks(test, where, *arguments, **options)
            else:
                found = given[where](test, *arguments, **options)
            found = [value for value in found if value is not None]
            if alike:
                assert len(found) > 1 and all(_equal(value, found[0]) for value in found), found

        fixtures = names if isinstance(where, int) else [where, *names]
        test.__signature__ = inspect.Signature(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in fixtures
        )
        return test

    return make
