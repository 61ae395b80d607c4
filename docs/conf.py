"""Builds the pages to HTML: `make docs`. The sources are the whole tree, so that links between pages hold as on GitHub."""

import inspect
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.inspect import stringify_signature

import torch_lowcomm

project = "torch_lowcomm"
author = "the torch_lowcomm authors"
version = release = torch_lowcomm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "*.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "csrc/**/*.md",
    "torch_lowcomm/**/*.md",
]
html_theme = "furo"
html_title = f"torch_lowcomm {version}"
html_extra_path = ["_root"]  # index.html, which leads to docs/index.html
suppress_warnings = ["misc.highlighting_failure"]  # blocks of FORMAT.md that a test reads have languages of their own

myst_heading_anchors = 3  # as GitHub makes them
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100  # a longer one has a line per parameter
autodoc_mock_imports = ["torchft"]  # not needed to read the pages
napoleon_numpy_docstring = False


# The pages of torch's documentation that describe the types in signatures; all others have pages of their own.
TORCH = "https://docs.pytorch.org/docs/stable"
TORCH_PAGES = {
    "torch.Tensor": "tensors",
    "torch.dtype": "tensor_attributes",
    "torch.device": "tensor_attributes",
    "torch.nn.Parameter": "generated/torch.nn.parameter.Parameter",
    "torch.optim.Optimizer": "optim",
    "torch.distributed": "distributed",
    "torch.distributed.pipelining": "distributed.pipelining",
}
# Modules in which torch defines what users import from elsewhere.
TORCH_NAMES = {
    "torch._C._distributed_c10d": "torch.distributed",
    "torch.distributed.distributed_c10d": "torch.distributed",
    "torch.distributed.device_mesh": "torch.distributed",
    "torch.nn.modules.module": "torch.nn",
    "torch.optim.optimizer": "torch.optim",
    "torch.distributed.pipelining.schedules": "torch.distributed.pipelining",
    "torch.distributed.pipelining.stage": "torch.distributed.pipelining",
}
STUB = Path(__file__).parents[1] / "torch_lowcomm" / "_C.pyi"


def link_torch(_app: object, _env: object, node: nodes.Element, text: nodes.Node) -> nodes.reference | None:
    """Links a type of torch's to its page there."""
    module, _, name = node.get("reftarget", "").rpartition(".")
    module = TORCH_NAMES.get(module, module)
    if module.partition(".")[0] != "torch":
        return None
    whole = f"{module}.{name}"
    page = TORCH_PAGES.get(whole) or TORCH_PAGES.get(module) or f"generated/{whole}"
    return nodes.reference("", "", text, internal=False, refuri=f"{TORCH}/{page}.html", reftitle=f"torch: {whole}")


def stub() -> dict[str, Any]:
    """The names of the extension's stub, run as Python: its classes and functions have signatures."""
    names: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + STUB.read_text(), STUB, "exec"), names)
    return names


SIGNED = stub()


def sign_extension(
    _app: object, what: str, name: str, value: object, _options: object, _signature: str | None, _returns: str | None
) -> tuple[str, str | None] | None:
    """Gives a method of the extension the signature of its stub: pybind11 spells int by the protocols that it takes."""
    if what != "method" or type(value).__name__ != "instancemethod":
        return None
    owner, _, method = name.removeprefix("torch_lowcomm.").rpartition(".")
    found = inspect.signature(getattr(SIGNED[owner], method))
    parameters = [each for each in found.parameters.values() if each.name != "self"]
    returns = str(found.return_annotation)
    return stringify_signature(found.replace(parameters=parameters), show_return_annotation=False), returns


def mark_code(_app: object, _what: str, name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Marks indented paragraphs of a docstring as code, as a reader of the source takes them; a stub's is preferred."""
    if text := getattr(SIGNED.get(name.removeprefix("torch_lowcomm.")), "__doc__", None):
        lines[:] = inspect.cleandoc(text).splitlines()
    marked: list[str] = []
    for line in lines:
        before = next((earlier for earlier in reversed(marked) if earlier.strip()), "")
        begins = line.startswith(" ") and marked and not marked[-1].strip()
        if begins and not before.startswith(" ") and not before.endswith(":"):
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def setup(app: object) -> None:
    """Connects what is above, `mark_code` before napoleon reads the docstrings."""
    for bound in (torch_lowcomm.Options, torch_lowcomm.Codec):
        bound.__signature__ = inspect.signature(SIGNED[bound.__name__])
    app.connect("missing-reference", link_torch)
    app.connect("autodoc-process-signature", sign_extension)
    app.connect("autodoc-process-docstring", mark_code, priority=400)
