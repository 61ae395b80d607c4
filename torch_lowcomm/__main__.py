"""`python -m torch_lowcomm info | doctor | plan | run | top | status | store | relay`."""

import sys

from torch_lowcomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
