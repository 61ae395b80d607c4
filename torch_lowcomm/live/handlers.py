"""Puts lowcomm's page into torch's debug server (`torch.distributed.debug`)."""

import importlib
import importlib.util
import json
from typing import Any

from torch_lowcomm.live.account import account

HANDLER = "lowcomm"


def debug_handlers() -> list[Any]:
    """Returns the pages of torch's debug server, and one of lowcomm. Every rank calls it.

        from torch.distributed.debug import start_debug_server
        start_debug_server(handlers=lc.debug_handlers())       # before init_process_group; rank 0 serves port 25999

    The page, and `lowcomm top HOST:25999`, show every rank's ops under way and who waits for whom; links; bytes, seconds and
    errors; the progress of outer loops, memberships and plans. docs/watch.md says what the columns are.

    Raises:
        ImportError: This torch has no debug server, or a package that it needs is missing; the text has the remedy.
    """
    try:
        debug = importlib.import_module("torch.distributed.debug._debug_handlers")
        page = importlib.import_module("torch_lowcomm.live.page")
        if not any(map(importlib.util.find_spec, ("aiohttp", "requests"))):
            raise ModuleNotFoundError("No module named 'aiohttp', and none named 'requests'", name="aiohttp")
    except ImportError as error:
        is_torchs = (error.name or "torch").startswith("torch")
        remedy = "torch 2.11 to 2.15 have it" if is_torchs else "pip install jinja2 tabulate aiohttp"
        raise ImportError(f"debug_handlers: torch's debug server cannot be used: {error}: {remedy}") from error
    from torch._C._distributed_c10d import _register_handler

    _register_handler(HANDLER, _answer)
    return [*debug.default_handlers(), page.LowcommPage()]


def _answer(_: Any, response: Any) -> None:
    """Answers the front end with this rank's account."""
    response.set_content(json.dumps(account()).encode(), "application/json")
    response.set_status(200)
