"""`python benchmarks/linklab …`: see cli.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # In place of this folder, which holds the package's parts and not the package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    from linklab.cli import main

    sys.exit(main(sys.argv[1:]))
