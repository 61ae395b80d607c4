"""`python benchmarks/faults …`: see cli.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # In place of this folder, which holds the package's parts and not the package; ranks are started as the tests' are.
    benchmarks = Path(__file__).resolve().parents[1]
    sys.path[0] = str(benchmarks)
    sys.path.insert(1, str(benchmarks.parent / "tests" / "python"))

    from faults.cli import main

    sys.exit(main(sys.argv[1:]))
