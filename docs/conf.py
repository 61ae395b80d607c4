"""Builds the pages to HTML: `make docs`. The sources are the whole tree, so that links between pages hold as on GitHub."""

from torch_lowcomm import __version__

project = "torch_lowcomm"
author = "the torch_lowcomm authors"
version = release = __version__

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
autodoc_typehints = "none"
autodoc_mock_imports = ["torchft"]  # not needed to read the pages
napoleon_numpy_docstring = False


def mark_code(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Marks indented paragraphs of a docstring as code, as a reader of the source takes them."""
    marked: list[str] = []
    for line in lines:
        before = next((earlier for earlier in reversed(marked) if earlier.strip()), "")
        begins = line.startswith(" ") and marked and not marked[-1].strip()
        if begins and not before.startswith(" ") and not before.endswith(":"):
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def setup(app: object) -> None:
    """Connects what is above, before napoleon reads the docstrings."""
    app.connect("autodoc-process-docstring", mark_code, priority=400)
