"""Reads what GoogleTest and cuda_perf leave behind: facts for the JSON, and what is wrong in them."""

import json


def unit_tests(shards):
    """({passed, skipped, failed}, what is wrong) of GoogleTest's JSON reports, one a shard."""
    counts, wrong = {"passed": 0, "skipped": 0, "failed": 0}, []
    for path in shards:
        if not path.exists():
            wrong.append(f"{path.stem}: expected a report, got none: it ended before its last test")
            continue
        for suite in json.loads(path.read_text())["testsuites"]:
            for test in suite["testsuite"]:
                name = f"{test['classname']}.{test['name']}"
                if test.get("failures"):
                    counts["failed"] += 1
                    wrong.append(f"{name}: {test['failures'][0]['failure'][:500]}")
                elif test["status"] == "RUN":
                    counts["skipped" if test["result"] == "SKIPPED" else "passed"] += 1
    if not wrong and counts["passed"] == 0:
        wrong.append(f"expected tests that pass, got none and {counts['skipped']} that were skipped")
    return counts, wrong


def kernel_speed(path):
    """({rows, below}, what is wrong) of cuda_perf's JSON: other bytes than the host's are, a row below its bound is not."""
    rows = json.loads(path.read_text())["rows"]
    named = {f"{row['codec']} {row['dtype']} {row['loop']}": row for row in rows}
    wrong = [
        f"{name}: expected the host's values, got others" for name, row in named.items() if not row["same_as_host"]
    ]
    if not rows:
        wrong.append("expected rows, got none: cuda_perf found no GPU")
    below = {name: [row["percent_of_copy"], row["bound"]] for name, row in named.items() if not row["pass"]}
    return {"rows": len(rows), "below_their_bound": below}, wrong
