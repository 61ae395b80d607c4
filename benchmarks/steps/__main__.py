"""`python benchmarks/steps`: see cli.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from steps import cli

if __name__ == "__main__":
    sys.exit(cli.main())
