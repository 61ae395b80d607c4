"""Raises one sentence, in place of a page of undefined symbols, when torch and the extension do not fit.

The build reads this file too (`cmake/find_torch.py`), before there is a package: it must not import from this package.
"""

import importlib.util
import pathlib
import sys

OLDEST, NEWEST = (2, 11), (2, 15)
SUPPORTED = f"2.{OLDEST[1]} to 2.{NEWEST[1]}"


def minor(version: str) -> tuple[int, ...]:
    """Returns (2, 13) for "2.13.0+cpu"."""
    return tuple(int(part) for part in version.split(".")[:2])


def shadowed(package: pathlib.Path) -> pathlib.Path | None:
    """Returns the built package of this name that `package`, first on sys.path, hides; None if it hides none."""
    for entry in sys.path:
        other = (pathlib.Path(entry) / package.name).resolve()
        if other != package and (other / "_build_info.py").is_file():
            return other
    return None


def problem(found: str | None, built: str | None) -> str | None:
    """Returns a sentence on what is wrong, or None, of the torch that would be imported and the one that the extension was built
    for; None: there is no torch, or no extension.
    """
    if found is None:
        return f"torch_lowcomm needs PyTorch {SUPPORTED}: found none; install torch first."
    if minor(found) < OLDEST:
        return f"torch_lowcomm needs PyTorch {SUPPORTED}: found {found}, which is too old."
    package = pathlib.Path(__file__).resolve().parent
    if built is None and (hidden := shadowed(package)):
        return (
            f"torch_lowcomm's extension is not built in its source folder {package}, which hides the installed {hidden}: "
            "run from another folder, or build it here with `pip install --no-build-isolation -e .`."
        )
    if built is None:
        return (
            "torch_lowcomm's extension is not built: run `pip install --no-build-isolation -e .` in its source folder."
        )
    if minor(found) != minor(built):
        return (
            f"torch_lowcomm was built for PyTorch {built} and found {found}: a build belongs to one minor version; "
            "rebuild it with `pip install --no-build-isolation --force-reinstall --no-deps .` in its source folder."
        )
    return None


def check_torch() -> None:
    """Raises ImportError, of one sentence, where torch is missing, too old, or of another minor version than the build."""
    found = None
    if importlib.util.find_spec("torch") is not None:
        import torch

        found = str(torch.__version__)
    try:
        from torch_lowcomm._build_info import TORCH_VERSION as built
    except ImportError:
        built = None
    message = problem(found, built)
    if message:
        raise ImportError(message)
