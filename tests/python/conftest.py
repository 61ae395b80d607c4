"""Shared fixtures: ranks that stay up for the session, and the zygote that forks all others."""

import pytest
import ranks


@pytest.fixture(scope="session", autouse=True)
def _zygote():
    yield
    ranks.close_zygote()


@pytest.fixture(scope="session")
def pair(_zygote):
    """Two ranks: `pair(fn, *args, timeout=60)` runs `fn(Rank, *args)` on both and returns their values."""
    pool = ranks.Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def trio(_zygote):
    """Three ranks: the fewest with one that a fault between two others reaches at second hand."""
    pool = ranks.Pool(3)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def quad(_zygote):
    """Four ranks."""
    pool = ranks.Pool(4)
    yield pool
    pool.close()
