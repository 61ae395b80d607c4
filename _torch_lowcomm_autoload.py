"""What torch calls at the end of `import torch` (entry point group `torch.backends`): makes `backend="lowcomm"` known.

It also runs in launchers and in programs that never use lowcomm. So it registers a name, imports nothing heavy, starts no
thread and never breaks `import torch`: what fails here becomes a warning. The package itself is imported when the first
group is made, or at once where the environment says LOWCOMM_AS_GLOO=1: then lowcomm takes gloo's place in this process.
"""

import os
import warnings
from typing import Any


def register() -> None:
    """Do the entry point's work. Any number of times; a failure is a RuntimeWarning of one sentence."""
    doing = "register its backend"
    try:
        register_backend()
        doing = "take gloo's place (LOWCOMM_AS_GLOO=1)"
        value = os.environ.get("LOWCOMM_AS_GLOO", "")
        if value not in ("", "0", "1"):
            said = (
                f"torch_lowcomm leaves gloo in its place: expected LOWCOMM_AS_GLOO to be 1, 0 or unset, got {value!r}"
            )
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        elif value == "1":
            from torch_lowcomm import as_gloo

            as_gloo.install()
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(f"torch_lowcomm could not {doing} with this torch: {why}", RuntimeWarning, stacklevel=2)


def register_backend() -> None:
    """Register the backend's name with torch.distributed; raises what torch does. Any number of times."""
    import torch.distributed as dist

    if dist.is_available() and not dist.is_backend_available("lowcomm"):
        dist.Backend.register_backend("lowcomm", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(dist_backend_opts: Any, pg_options: Any) -> Any:
    from torch_lowcomm._create import create_backend

    return create_backend(dist_backend_opts, pg_options)
