"""Two ways to start a rank: a fork of the zygote, which has imported everything, or a fresh interpreter."""

import contextlib
import ctypes
import gc
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing import connection

from ranks.child import PR_SET_PDEATHSIG, enter, perform

TESTS = pathlib.Path(__file__).resolve().parents[1]


def serve_requests(fd):
    """Imports once, then forks a rank a request and reports each one's end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed._functional_collectives
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    conn = connection.Connection(fd)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    gc.collect()
    gc.freeze()  # what is imported is not walked again at every rank's end
    conn.send(("ready", sorted(os.listdir("/proc/self/task"))))
    while True:
        ready = connection.wait([conn, wake_read])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    conn.send(("exit", ended[0], os.waitstatus_to_exitcode(ended[1])))
        if conn in ready:
            try:
                request = conn.recv()
            except EOFError:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (fd, wake_read, wake_write):
                    os.close(inherited)
                code = 1
                try:
                    enter(request)
                    code = perform(request)
                except BaseException:
                    traceback.print_exc()
                # The whole of an exit: threads joined, atexit, finalisation, C destructors.
                ctypes.pythonapi.Py_Exit(ctypes.c_int(code))
            conn.send(("pid", pid))


def environment(changes=None):
    """One thread a rank, gloo on loopback, no noise about torch's renamings; `changes` on top, None unsets."""
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    env["PYTHONWARNINGS"] = "ignore::FutureWarning"
    for key, value in (changes or {}).items():
        env.pop(key, None)
        if value is not None:
            env[key] = str(value)
    return env


def _python(code):
    """A fresh interpreter that finds these modules."""
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r}); {code}"]


class Zygote:
    """The parent's end of the zygote: starts ranks and learns how they ended."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        command = _python(f"from ranks import starters; starters.serve_requests({theirs.fileno()})")
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment())
        theirs.close()
        self.conn = connection.Connection(ours.detach())
        self.ended = {}
        kind, self.threads = self.conn.recv()
        assert kind == "ready"

    def start(self, request):
        self.conn.send(request)
        while True:
            message = self.conn.recv()
            if message[0] == "pid":
                self.ended.pop(message[1], None)  # of an earlier rank that had the number
                return message[1]
            self.ended[message[1]] = message[2]

    def poll(self, pid, timeout_s=0.0):
        """The exit code of a rank that ended (negative: a signal), or None."""
        if pid in self.ended:
            return self.ended[pid]
        if self.conn.poll(timeout_s):
            message = self.conn.recv()
            self.ended[message[1]] = message[2]
        return self.ended.get(pid)

    def close(self):
        self.conn.close()
        self.process.wait(60)


class Spawner:
    """The same interface over fresh interpreters."""

    def __init__(self):
        self.processes = {}

    def start(self, request):
        path = request.output + ".request"
        pathlib.Path(path).write_bytes(pickle.dumps(request))
        env = environment(request.env)
        process = subprocess.Popen(_python(f"from ranks import child; child.spawned({path!r})"), env=env)
        self.processes[process.pid] = process
        return process.pid

    def poll(self, pid, timeout_s=0.0):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[pid].wait(timeout_s)
        return self.processes[pid].poll()


_zygotes = []


def zygote():
    """The session's zygote, started on first use."""
    if not _zygotes:
        _zygotes.append(Zygote())
    return _zygotes[0]


def close_zygote():
    while _zygotes:
        _zygotes.pop().close()
