#!/bin/sh
# Runs a command where everything that tests/optional.py lists is missing: `tests/bare.sh .venv/bin/python -m pytest`.
# Needs root, for a mount namespace of its own in which the tools are no programs.
set -e
root=$(cd "$(dirname "$0")/.." && pwd)
if [ "$BARE" != 1 ]; then
  BARE=1 exec unshare --mount "$0" "$@"
fi
hidden=$(mktemp -d)
# Every Python that is started imports this first.
cat >"$hidden/sitecustomize.py" <<EOF
import sys
from importlib.machinery import PathFinder
sys.path.append("$root/tests")
from optional import PIP
sys.path.remove("$root/tests")
found = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.partition(".")[0] in PIP else found(name, path, target)
)
EOF
for what in $(python3 -c 'import sys; sys.path.append(sys.argv[1]); from optional import DEBIAN; print(*DEBIAN)' "$root/tests"); do
  case $what in
    /*) test ! -d "$what" || { mount -t tmpfs none "$(dirname "$what")"; } ;;
    *) for folder in $(echo "$PATH:/usr/sbin:/sbin" | tr : ' '); do
         test ! -e "$folder/$what" || mount --bind /dev/null "$(readlink -f "$folder/$what")" 2>/dev/null || true
       done ;;
  esac
done
PYTHONPATH="$hidden${PYTHONPATH:+:$PYTHONPATH}" exec "$@"
