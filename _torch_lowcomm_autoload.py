"""What torch calls at the end of `import torch` (entry point group `torch.backends`): makes `backend="lowcomm"` known.

It also runs in launchers and in programs that never use lowcomm. So it registers a name, imports nothing heavy, starts no
thread and never breaks `import torch`: what fails here becomes a warning. The package itself is imported when the first
group is made.
"""

import warnings
from typing import Any


def register() -> None:
    """Register the backend, as the entry point. Any number of times; a failure is a RuntimeWarning of one sentence."""
    try:
        register_backend()
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(
            f"torch_lowcomm could not register its backend with this torch: {why}", RuntimeWarning, stacklevel=2
        )


def register_backend() -> None:
    """Register the backend's name with torch.distributed; raises what torch does. Any number of times."""
    import torch.distributed as dist

    if dist.is_available() and not dist.is_backend_available("lowcomm"):
        dist.Backend.register_backend("lowcomm", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(dist_backend_opts: Any, pg_options: Any) -> Any:
    from torch_lowcomm._create import create_backend

    return create_backend(dist_backend_opts, pg_options)
