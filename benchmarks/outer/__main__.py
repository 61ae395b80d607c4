"""`python benchmarks/outer`: see cli.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # In place of this folder, which holds the package's parts and not the package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    from outer import cli

    sys.exit(cli.main())
