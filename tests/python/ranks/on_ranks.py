"""Tests whose function runs on the ranks."""

import functools
import inspect

from ranks.job import run_ranks


def on_ranks(where, **options):
    """Makes `fn(Rank, *arguments)` a test that runs on every rank; its other parameters are the test's.

    Args:
        where: "pair", "trio" or "quad", the fixture with ranks that stay; or the number of fresh processes.
        options: Those of the fixture's call or of `run_ranks`, as `timeout`.
    """

    def make(fn):
        names = list(inspect.signature(fn).parameters)[1:]

        @functools.wraps(fn)
        def test(*rank_and_arguments, **given):
            if rank_and_arguments:  # on a rank, which finds the test by its name
                return fn(*rank_and_arguments)
            arguments = [given[name] for name in names]
            if isinstance(where, int):
                run_ranks(test, where, *arguments, **options)
            else:
                given[where](test, *arguments, **options)

        fixtures = names if isinstance(where, int) else [where, *names]
        test.__signature__ = inspect.Signature(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in fixtures
        )
        return test

    return make
