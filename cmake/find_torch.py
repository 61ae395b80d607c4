"""Print "DIR;VERSION" of the torch that this interpreter would import, without importing it."""

import importlib.util
import pathlib
import sys

OLDEST, NEWEST = (2, 11), (2, 15)

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit(
        f"torch_lowcomm builds against PyTorch 2.{OLDEST[1]} to 2.{NEWEST[1]}: found none; install torch first "
        "(for example `pip install torch==2.13.0`) and build with --no-build-isolation."
    )
directory = pathlib.Path(spec.origin).parent
names: dict[str, str] = {}
exec((directory / "version.py").read_text(), names)
version = str(names["__version__"])
minor = tuple(int(part) for part in version.split(".")[:2])
if not OLDEST <= minor <= NEWEST:
    sys.exit(f"torch_lowcomm builds against PyTorch 2.{OLDEST[1]} to 2.{NEWEST[1]}: found {version} in {directory}.")
print(f"{directory};{version.split('+')[0]}")
