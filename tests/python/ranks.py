"""Runs a function as the ranks of a job: real processes, a deadline, every exit code checked, nothing left behind.

Importing torch costs seconds, so one process (the zygote) imports it once and forks a rank in milliseconds. A forked
rank does not end by `os._exit`: it finalises its interpreter and runs the C destructors, as a script's end does, for
that is where backends abort. `start="spawn"` makes fresh interpreters instead. Two ways in:

- `run_ranks(fn, world_size, *args)`: fresh processes, for what kills, stalls, exits or sets the environment;
- the fixtures `pair` and `quad` (`conftest.py`): processes that stay, each call with a store of its own.

`fn` is a module-level function; it gets a `Rank` first, and what it returns (picklable) comes back, one item a rank.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import gc
import itertools
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing import connection

HERE = pathlib.Path(__file__).resolve().parent
GRACE_S = 5.0  # what the other ranks get once one has failed
PR_SET_PDEATHSIG = 1


class RanksFailed(AssertionError):
    """A rank raised, ended with a code nobody allowed, or outlived the deadline; the message holds every rank's say."""


@dataclasses.dataclass
class Rank:
    """What a rank knows: its number, the world's size, and a folder of this job's own for stores and files."""

    rank: int
    size: int
    folder: str
    stores: int = 0

    def init(self, backend="lowcomm", timeout_s=60.0, **options):
        """`init_process_group` on a fresh file store; again after a destroy on the next one."""
        import torch.distributed as dist

        self.stores += 1
        dist.init_process_group(
            backend,
            init_method=f"file://{self.folder}/store{self.stores}",
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=timeout_s),
            **options,
        )

    def path(self, name):
        return pathlib.Path(self.folder) / name

    def say(self, name, text=""):
        """Leaves a note for the other ranks in the job's folder (not by any group: for tests that break groups)."""
        part = self.path(f"{name}.part{self.rank}")
        part.write_text(str(text))
        part.rename(self.path(name))

    def hear(self, name, timeout_s=30.0):
        """Waits for a note and returns its text."""
        end = time.monotonic() + timeout_s
        while not self.path(name).exists():
            if time.monotonic() > end:
                raise TimeoutError(f"no rank said {name!r} within {timeout_s} s")
            time.sleep(0.005)
        return self.path(name).read_text()


@dataclasses.dataclass
class _Request:
    """One rank to start. Pickled to the zygote, or to a file for a fresh interpreter."""

    rank: Rank
    body: bytes  # pickled (fn, args)
    source: str  # the folder of fn's module
    env: dict
    output: str
    result: str


# ---- in the child ------------------------------------------------------------------------------------------------


def _enter(request):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    out = os.open(request.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, fd in ((0, null), (1, out), (2, out)):
        os.dup2(fd, target)
    os.close(out)
    os.close(null)
    for key, value in request.env.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = str(value)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the deadline asks for every stack before it kills


def _perform(request):
    """Runs the function; returns the exit code."""
    import torch.distributed as dist

    dist.set_debug_level_from_env()
    if request.source not in sys.path:
        sys.path.insert(0, request.source)
    try:
        fn, args = pickle.loads(request.body)
        answer = (True, fn(request.rank, *args))
        code = 0
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        answer = (False, traceback.format_exc())
        code = 1
    _write(request.result, answer)
    return code


def _write(path, answer):
    part = path + ".part"
    pathlib.Path(part).write_bytes(pickle.dumps(answer))
    pathlib.Path(part).rename(path)


def _spawned(path):
    request = pickle.loads(pathlib.Path(path).read_bytes())
    _enter(request)
    sys.exit(_perform(request))


# ---- the zygote --------------------------------------------------------------------------------------------------


def _zygote(fd):
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
                    _enter(request)
                    code = _perform(request)
                except BaseException:
                    traceback.print_exc()
                # The whole of an exit: threads joined, atexit, finalisation, C destructors.
                ctypes.pythonapi.Py_Exit(ctypes.c_int(code))
            conn.send(("pid", pid))


def _environment(changes=None):
    """One thread a rank, gloo on loopback, no noise about torch's renamings; `changes` on top, None unsets."""
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    env["PYTHONWARNINGS"] = "ignore::FutureWarning"
    for key, value in (changes or {}).items():
        env.pop(key, None)
        if value is not None:
            env[key] = str(value)
    return env


class Zygote:
    """The parent's end of the zygote: starts ranks and learns how they ended."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import ranks; ranks._zygote({theirs.fileno()})"
        self.process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=_environment())
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
        self.process.wait(10)


class _Spawner:
    """The same interface over fresh interpreters."""

    def __init__(self):
        self.processes = {}

    def start(self, request):
        path = request.output + ".request"
        pathlib.Path(path).write_bytes(pickle.dumps(request))
        env = _environment(request.env)
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import ranks; ranks._spawned({path!r})"
        process = subprocess.Popen([sys.executable, "-c", code], env=env)
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


# ---- in the test's process ---------------------------------------------------------------------------------------


class _Job:
    """Started ranks, with what each printed, answered and how it ended."""

    def __init__(self, starter, fn, size, args, env):
        self.starter = starter
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ranks-"))
        self.requests = [
            _Request(
                rank=Rank(r, size, str(self.folder)),
                body=pickle.dumps((fn, args)),
                source=str(pathlib.Path(sys.modules[fn.__module__].__file__).parent),
                env=dict(env or {}),
                output=str(self.folder / f"output{r}"),
                result=str(self.folder / f"result{r}"),
            )
            for r in range(size)
        ]
        self.pids = [starter.start(request) for request in self.requests]
        self.killed = set()

    def code(self, r, timeout_s=0.0):
        return self.starter.poll(self.pids[r], timeout_s)

    def alive(self):
        return [r for r in range(len(self.pids)) if self.code(r) is None]

    def kill(self, ranks, stacks=None):
        """The end, by process number; first each rank's stacks (or those of some ranks) into its output."""
        asked = ranks if stacks is None else set(ranks) & set(stacks)
        for r in asked:
            os.kill(self.pids[r], signal.SIGUSR1)
        time.sleep(0.3 if asked else 0)
        for r in ranks:
            if self.code(r) is None:
                os.kill(self.pids[r], signal.SIGKILL)
                self.killed.add(r)
        for r in ranks:
            while self.code(r, 0.05) is None:
                pass

    def output(self, r):
        path = pathlib.Path(self.requests[r].output)
        return path.read_text(errors="replace") if path.exists() else ""

    def answer(self, r):
        path = pathlib.Path(self.requests[r].result)
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def report(self, why):
        parts = [why]
        for r in range(len(self.pids)):
            answer = self.answer(r)
            code = self.code(r)
            ended = "killed" if r in self.killed else f"exit code {code}"
            parts.append(f"---- rank {r}: {ended}\n{answer[1] if answer and not answer[0] else ''}{self.output(r)}")
        return RanksFailed("\n".join(parts))

    def remove(self):
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        self.folder.rmdir()


def run_ranks(
    fn,
    world_size,
    *args,
    timeout=60.0,
    env=None,
    allow_exit=None,
    kill_last=(),
    start="fork",
    outputs=None,
    exit_codes=None,
):
    """Runs `fn(Rank, *args)` on fresh processes; returns what each rank returned.

    Args:
        timeout: seconds until what is left is killed and the call fails with every rank's output and stacks.
        env: environment of the ranks, over the caller's; None unsets.
        allow_exit: rank -> an exit code or several (negative: a signal) that are no failure; such a rank may answer
            nothing (None in its place). Every other rank must end with 0, by itself.
        kill_last: ranks to kill once all the others have ended (a rank that a test stopped).
        start: "fork" from the zygote, or "spawn" a fresh interpreter.
        outputs: a list that gets each rank's stdout and stderr.
        exit_codes: a list that gets each rank's exit code.
    """
    allowed = {r: {c} if isinstance(c, int) else set(c) for r, c in (allow_exit or {}).items()}
    for r in kill_last:
        allowed.setdefault(r, set()).add(-signal.SIGKILL)
    job = _Job(zygote() if start == "fork" else _Spawner(), fn, world_size, args, env)
    ranks = range(world_size)
    end = time.monotonic() + timeout
    why = None
    try:
        while alive := job.alive():
            wrong = [r for r in ranks if job.code(r) is not None and job.code(r) not in allowed.get(r, set()) | {0}]
            if wrong and why is None:
                why = f"rank {wrong[0]} failed"
                end = min(end, time.monotonic() + GRACE_S)
            if set(alive) <= set(kill_last):
                job.kill(alive)
                break
            if time.monotonic() > end:
                why = why or f"no end within {timeout} s"
                job.kill(alive)
                break
            job.code(alive[0], 0.02)
        for r in ranks:
            code = job.code(r)
            if code not in allowed.get(r, set()) | {0}:
                why = why or f"rank {r} ended with code {code}"
            elif code == 0 and job.answer(r) is None and r not in allowed:
                why = why or f"rank {r} ended without an answer"
        if why:
            raise job.report(why)
        if exit_codes is not None:
            exit_codes.extend(job.code(r) for r in ranks)
        if outputs is not None:
            outputs.extend(job.output(r) for r in ranks)
        return [answer[1] if (answer := job.answer(r)) else None for r in ranks]
    finally:
        job.kill(job.alive())
        job.remove()


def _serve(rank, address):
    """A pool's rank: one function a message, a store of its own for each, until told to end."""
    import torch
    import torch.distributed as dist

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        conn = connection.Connection(client.detach())
    _send(conn, rank.rank)
    while (message := _receive(conn)) is not None:
        folder, body = message
        try:
            fn, args = pickle.loads(body)
            torch.manual_seed(0)
            value = fn(Rank(rank.rank, rank.size, folder), *args)
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
            _send(conn, (True, value))
        except BaseException:
            _send(conn, (False, traceback.format_exc()))
    conn.close()


# By value: torch teaches Connection.send to share tensors' memory, which asks for the sender later.
def _send(conn, message):
    conn.send_bytes(pickle.dumps(message))


def _receive(conn):
    return pickle.loads(conn.recv_bytes())


class Pool:
    """`size` ranks that stay: `pool(fn, *args)` costs milliseconds. A failure ends them; the next call starts others."""

    def __init__(self, size):
        self.size = size
        self.job = None
        self.calls = itertools.count()

    def _open(self):
        self.folder = tempfile.TemporaryDirectory(prefix="pool-")
        address = f"{self.folder.name}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            listener.settimeout(30)
            self.job = _Job(zygote(), _serve, self.size, (address,), None)
            conns = [connection.Connection(listener.accept()[0].detach()) for _ in range(self.size)]
        self.conns = [conn for _, conn in sorted(((_receive(c), c) for c in conns), key=lambda pair: pair[0])]

    def __call__(self, fn, *args, timeout=60.0):
        """Runs `fn(Rank, *args)` on every rank and returns their values; the group is destroyed for them after it."""
        if self.job is None:
            self._open()
        folder = pathlib.Path(self.folder.name) / f"call{next(self.calls)}"
        folder.mkdir()
        for conn in self.conns:
            _send(conn, (str(folder), pickle.dumps((fn, args))))
        answers = [None] * self.size
        end = time.monotonic() + timeout
        why = None
        while None in answers:
            waiting = [c for c, a in zip(self.conns, answers, strict=True) if a is None]
            for conn in connection.wait(waiting, max(0.0, end - time.monotonic())):
                r = self.conns.index(conn)
                try:
                    answers[r] = _receive(conn)
                except EOFError:
                    answers[r] = (False, "its process ended\n")
                if not answers[r][0] and why is None:
                    why = f"rank {r} failed"
                    end = min(end, time.monotonic() + GRACE_S)
            if time.monotonic() >= end and None in answers:
                why = why or f"no answer within {timeout} s"
                break
        if why is None:
            return [value for _, value in answers]
        self.job.kill(self.job.alive(), stacks=[r for r, a in enumerate(answers) if a is None])
        said = "".join(f"---- rank {r} raised\n{a[1]}" for r, a in enumerate(answers) if a and not a[0])
        failure = self.job.report(f"{why}\n{said}")
        self._forget()
        raise failure

    def _forget(self):
        for conn in self.conns:
            conn.close()
        self.job.remove()
        self.job = None
        self.folder.cleanup()

    def close(self, timeout=20.0):
        """Ends the ranks, and checks that each ended cleanly."""
        if self.job is None:
            return
        for conn in self.conns:
            _send(conn, None)
        end = time.monotonic() + timeout
        while self.job.alive() and time.monotonic() < end:
            self.job.code(self.job.alive()[0], 0.05)
        late = self.job.alive()
        self.job.kill(late)
        codes = [self.job.code(r) for r in range(self.size)]
        failure = self.job.report(f"the pool's ranks ended with {codes}") if any(codes) else None
        self._forget()
        if failure:
            raise failure


def run_command(args, *, timeout, env=None, cwd=None):
    """Runs a command (torchrun and what it starts) in a session of its own; at the deadline that session is killed.

    Returns (exit code, stdout and stderr together).
    """
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [str(a) for a in args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=_environment(env),
            cwd=cwd,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        text = out.read()
    if code is None:
        raise RanksFailed(f"no end within {timeout} s: {' '.join(map(str, args))}\n{text}")
    return code, text
