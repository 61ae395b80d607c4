#!/bin/sh
# Runs every test with threads, processes or sockets TIMES times (30) beside eight busy processes, and lists the failures:
# hours. `make test-stress`, after `make test-cpp`; arguments are pytest's (a folder, say, in place of all).
cd "$(dirname "$0")/.." || exit 2
times=${TIMES:-30}
busy=""
for _ in 1 2 3 4 5 6 7 8; do
  (while :; do :; done) &
  busy="$busy $!"
done
trap 'kill $busy 2>/dev/null' EXIT INT TERM
log=$(mktemp)
# Fuzz replays, counted instructions and simulated kernels are of one thread.
test $# -gt 0 || ctest --test-dir build --parallel "$(($(nproc) + 1))" --repeat until-fail:"$times" --exclude-regex '^(fuzz|simulated)\.|Instructions' 2>&1 | tee -a "$log"
for turn in $(seq "$times"); do
  echo "turn $turn of $times"
  .venv/bin/python -m pytest -q -rf -n "$(($(nproc) + 1))" --dist worksteal --ignore tests/python/codec --ignore tests/python/wire "$@" 2>&1 | tee -a "$log" | grep -E '^FAILED|passed|failed'
done
echo "failed, and how often:"
grep -hE '^FAILED|\(Failed\)|\(Timeout\)' "$log" | sed 's/^ *[0-9]* - //; s/ - .*//' | sort | uniq -c
! grep -qE '^FAILED|\(Failed\)|\(Timeout\)' "$log"
