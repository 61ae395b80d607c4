"""Print a new secret: `python -m torch_lowcomm secret > ~/.lowcomm`, which every machine then gets by a safe way.

All ranks of a job are started with LOWCOMM_SECRET_FILE=~/.lowcomm. A file that the secret is
written to becomes one that only its owner may read; others are refused.
"""

import argparse
import os
import secrets
import stat
import sys

_BYTES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: there are none."""


def _keep_from_others() -> None:
    """Lets nobody but the owner read the file that stdout goes to, if it goes to one."""
    try:
        descriptor = sys.stdout.fileno()
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)
    except OSError as error:  # no file, or another's
        print(f"torch_lowcomm secret: the file's mode stays as it is: {error}", file=sys.stderr)


def main(arguments: argparse.Namespace) -> int:
    """Prints 32 random bytes of the system as text."""
    del arguments
    _keep_from_others()
    print(secrets.token_urlsafe(_BYTES))
    return 0
