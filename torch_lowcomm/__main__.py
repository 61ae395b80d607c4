"""`python -m torch_lowcomm info | doctor | plan | run | bench | secret | relay`."""

import sys

from torch_lowcomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
