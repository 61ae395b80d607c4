"""Makes `backend="lowcomm"` and `init_method="lowcomm://…"` known to torch.

torch calls it at the end of `import torch` (entry point group `torch.backends`); from 2.14 on also where a group asks for the
name and nothing has registered it (`torch.distributed.backends`).

It also runs in launchers and in programs that never use lowcomm. So it registers a name, imports nothing heavy, starts no
thread and never breaks `import torch`: a failure here becomes a warning. The package itself is imported when the first
group is made. If the environment has LOWCOMM_AS_GLOO=1 it is imported at once, and takes gloo's place in this process.
"""

import os
import warnings
from typing import Any


def register() -> None:
    """Does the entry point's work; a failure is a RuntimeWarning of one sentence. It may be called any number of times."""
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
    """Registers the backend's name with torch.distributed; raises torch's errors. It may be called any number of times."""
    import torch.distributed as dist

    # Not by is_backend_available(): since 2.14 that looks for the entry point, which calls this.
    if dist.is_available() and "lowcomm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("lowcomm", _create, extended_api=True, devices=["cpu", "cuda"])
        dist.register_rendezvous_handler("lowcomm", _rendezvous)


def _create(dist_backend_opts: Any, pg_options: Any) -> Any:
    from torch_lowcomm._create import create_backend

    return create_backend(dist_backend_opts, pg_options)


def _rendezvous(url: str, **options: Any) -> Any:
    from torch_lowcomm.rendezvous import handler

    return handler(url, **options)
