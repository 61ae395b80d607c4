#!/usr/bin/env bash
# neon.sh TESTS JOBS: runs the GoogleTest binary TESTS, which is for aarch64, under qemu: its tests dealt out to JOBS processes.
# Needs Debian's qemu-user and g++-aarch64-linux-gnu.
set -euo pipefail
shards=()
for ((i = 0; i < $2; ++i)); do
  GTEST_TOTAL_SHARDS=$2 GTEST_SHARD_INDEX=$i qemu-aarch64 -L /usr/aarch64-linux-gnu "$1" --gtest_brief=1 &
  shards+=($!)
done
failed=0
for shard in "${shards[@]}"; do wait "$shard" || failed=1; done
exit $failed
