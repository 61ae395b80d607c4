"""`python tests/python/gpu_check …`: see cli.py."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).resolve().parents[1]
    sys.path[0] = str(tests)  # in place of this folder, which holds the package's parts and not the package
    # Ranks and tests import the extension that the build step puts into this tree.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(tests.parents[1]), os.environ.get("PYTHONPATH"))))

    import ranks

    from gpu_check.cli import main

    code = main(sys.argv[1:])
    ranks.close_zygote()
    sys.exit(code)
