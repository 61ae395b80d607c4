"""Runs PyTorch's own DistributedTest (it ships in the wheel) on one of three backends and prints one line a test.

    python tests/python/distributed_suite.py lowcomm            # every group is lowcomm
    python tests/python/distributed_suite.py as_gloo            # every group that asks for "gloo" is built as lowcomm
    python tests/python/distributed_suite.py gloo               # the list to compare with
    python tests/python/distributed_suite.py lowcomm --tests test_ddp_comm_hook_allreduce_hook_ddp …

Lines read `pass NAME`, `fail NAME` and `skip NAME: reason`, the last one `total passed/failed/skipped`. The suite looks at
rank 0's exit code only; here every rank's must be that of rank 0. Ranks are forked (the suite's own imports cost seconds)
and end through the interpreter's and the C library's whole exit, not by `os._exit`.
"""

import argparse
import ctypes
import gc
import os
import shutil
import sys
import tempfile
import unittest
from multiprocessing import context


class WholeExitProcess(context.ForkProcess):
    """A forked process that ends as a script does, so that a backend which aborts at exit is seen to."""

    skips = frozenset()

    def _bootstrap(self, *args, **kwargs):
        code = super()._bootstrap(*args, **kwargs)
        if code in self.skips:  # nothing ran
            os._exit(code)
        ctypes.pythonapi.Py_Exit(ctypes.c_int(code))


def suite_class(check_exits):
    """The suite's class on forked ranks; BACKEND and WORLD_SIZE must stand in the environment."""
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as suite

    WholeExitProcess.skips = frozenset(skip.exit_code for skip in common_distributed.TEST_SKIPS.values())

    class TestDistBackend(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # The ranks inherit this folder's object, and the first of them to end would remove it.
            common_distributed.tmp_dir._finalizer.atexit = False
            self._start_processes(WholeExitProcess)

        def _check_return_codes(self, fn, elapsed_time):
            codes = [p.exitcode for p in self.processes]
            reported = None in codes or self.TEST_ERROR_EXIT_CODE in codes  # the suite says more than the codes do
            if check_exits and not reported and len(set(codes)) != 1:
                raise AssertionError(f"the ranks ended with exit codes {codes}")
            super()._check_return_codes(fn, elapsed_time)

    return TestDistBackend


class Lines(unittest.TestResult):
    """Collects `pass|fail|skip NAME` and prints each as it ends."""

    def __init__(self):
        super().__init__()
        self.counts = {"pass": 0, "fail": 0, "skip": 0}

    def line(self, verdict, test, text=""):
        self.counts[verdict] += 1
        print(f"{verdict} {test.id().rsplit('.', 1)[-1]}{text}", flush=True)

    def addSuccess(self, test):
        self.line("pass", test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.line("skip", test, ": " + " ".join(reason.split()))

    def addError(self, test, err):
        super().addError(test, err)
        self.line("fail", test)
        print("    " + self.errors[-1][1].replace("\n", "\n    "), file=sys.stderr, flush=True)

    addFailure = addError


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("lowcomm", "as_gloo", "gloo"))
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--tests", nargs="*", help="names; default all")
    args = parser.parse_args()

    scratch = tempfile.mkdtemp()
    os.environ.update(
        BACKEND="gloo" if args.backend == "as_gloo" else args.backend,
        WORLD_SIZE=str(args.world_size),
        INIT_METHOD=f"file://{scratch}/again",  # for the one test that makes its group anew
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60",
    )
    if args.backend == "as_gloo":
        import torch_lowcomm.as_gloo

        torch_lowcomm.as_gloo.install()
    # Plain gloo aborts at exit now and then: as the list to compare with, it is judged as the suite judges.
    cls = suite_class(check_exits=args.backend != "gloo")
    names = args.tests or unittest.defaultTestLoader.getTestCaseNames(cls)
    result = Lines()
    gc.collect()
    gc.freeze()  # what is imported is not walked again at every rank's end
    unittest.TestSuite(cls(name) for name in names).run(result)
    print("total {pass}/{fail}/{skip}".format(**result.counts))
    shutil.rmtree(scratch)
    return int(result.counts["fail"] > 0)


if __name__ == "__main__":
    sys.exit(main())
