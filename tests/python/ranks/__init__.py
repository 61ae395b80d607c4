"""Runs a function as the ranks of a job: real processes, a deadline, every exit code checked, nothing left behind.

Importing torch costs seconds, so one process (the zygote) imports it once and forks a rank in milliseconds. A forked
rank does not end by `os._exit`: it finalises its interpreter and runs the C destructors, as a script's end does, for
that is where backends abort. `start="spawn"` makes fresh interpreters instead. Two ways in:

- `run_ranks(fn, world_size, *args)`: fresh processes, for what kills, stalls, exits or sets the environment;
- the fixtures `pair` and `quad` (`conftest.py`): processes that stay, each call with a store of its own.

`fn` is a module-level function; it gets a `Rank` first, and what it returns (picklable) comes back, one item a rank.
A test whose first parameter is `r` is such a function; the mark `on` says which ranks run it (`conftest.py`).
`run_command` runs a program instead (torchrun, an example) and gives its exit code, stdout and stderr.
"""

from ranks.alike import expect_alike
from ranks.child import Rank
from ranks.command import run_command, torchrun
from ranks.job import RanksFailed, run_ranks
from ranks.pool import Pool
from ranks.ports import free_port
from ranks.starters import close_zygote, zygote

__all__ = [
    "Pool",
    "Rank",
    "RanksFailed",
    "close_zygote",
    "expect_alike",
    "free_port",
    "run_command",
    "run_ranks",
    "torchrun",
    "zygote",
]
