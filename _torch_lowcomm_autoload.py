"""What torch calls at the end of `import torch` (entry point group `torch.backends`): makes `backend="lowcomm"` known.

It also runs in launchers and in programs that never use lowcomm, and a failure here would break `import torch` for
everybody: so it registers a name, imports nothing heavy and starts no thread. The package itself is imported when the
first group is made.
"""

from typing import Any


def register() -> None:
    """Register the backend name with torch.distributed. Any number of times."""
    import torch.distributed as dist

    if not dist.is_available() or "LOWCOMM" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("lowcomm", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(dist_backend_opts: Any, pg_options: Any) -> Any:
    from torch_lowcomm._create import create_backend

    return create_backend(dist_backend_opts, pg_options)
