"""Print "DIR;VERSION;CUDA" of the torch that this interpreter would import, without importing it; CUDA may be none."""

import importlib.util
import pathlib
import runpy
import sys

# The package cannot be imported before it is built, but the file that says which torch it works with can be read.
package = pathlib.Path(__file__).resolve().parent.parent / "torch_lowcomm"
compatibility = runpy.run_path(str(package / "_compatibility.py"))
supported = compatibility["SUPPORTED"]

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit(
        f"torch_lowcomm builds against PyTorch {supported}: found none; install torch first "
        "(for example `pip install torch==2.13.0`) and build with --no-build-isolation."
    )
directory = pathlib.Path(spec.origin).parent
names: dict[str, str | None] = {}
exec((directory / "version.py").read_text(), names)
version = str(names["__version__"])
if not compatibility["OLDEST"] <= compatibility["minor"](version) <= compatibility["NEWEST"]:
    sys.exit(f"torch_lowcomm builds against PyTorch {supported}: found {version} in {directory}.")
print(f"{directory};{version.split('+')[0]};{names.get('cuda') or 'none'}")
