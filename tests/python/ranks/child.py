"""A rank from the inside: what it is handed, how it sets itself up, and how it leaves its answer."""

import ctypes
import dataclasses
import datetime
import faulthandler
import os
import pathlib
import pickle
import signal
import sys
import time
import traceback

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000


@dataclasses.dataclass
class Rank:
    """A rank: its number, the world's size, and a folder of this job's own for stores and files."""

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

    def set_deadline(self, seconds):
        """Shortens the default group's progress deadline once it is made and warm, which takes a busy machine seconds."""
        import torch.distributed as dist

        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=seconds))

    def meet(self):
        """Returns once all ranks of the default group have called it, by its store: connections may be closing. Once a group."""
        import torch.distributed as dist

        store = dist.distributed_c10d._get_default_store()
        store.set(f"met {self.rank}", "")
        store.wait([f"met {rank}" for rank in range(self.size)])

    def enter(self, namespace):
        """Moves this thread, and what it starts from now on, to a network namespace, given as a path."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(namespace) as file:
            if libc.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {namespace}")

    def path(self, name):
        return pathlib.Path(self.folder) / name

    def say(self, name, text=""):
        """Leaves a note for the other ranks in the job's folder (not by any group: for tests that break groups)."""
        part = self.path(f"{name}.part{self.rank}")
        part.write_text(str(text))
        part.rename(self.path(name))

    def meet_at(self, name, timeout_s=30.0):
        """Returns once all ranks have called it, by notes; a name is for one meeting."""
        self.say(f"{name} {self.rank}")
        for rank in range(self.size):
            self.hear(f"{name} {rank}", timeout_s)

    def hear(self, name, timeout_s=30.0):
        """Waits for a note and returns its text."""
        begun = time.monotonic()
        while not self.path(name).exists():
            waited_s = time.monotonic() - begun
            if waited_s > timeout_s:
                raise TimeoutError(f"no rank said {name!r} within {timeout_s} s")
            time.sleep(min(0.005 + waited_s / 50, 0.1))
        return self.path(name).read_text()


@dataclasses.dataclass
class Request:
    """One rank to start. Pickled to the zygote, or to a file for a fresh interpreter."""

    rank: Rank
    body: bytes  # pickled (fn, args)
    source: str  # the folder that fn's module is imported from
    env: dict
    output: str
    result: str


def enter(request):
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


def import_from(folder):
    """Lets this process import the modules of a folder."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def perform(request):
    """Runs the function; returns the exit code."""
    import torch.distributed as dist

    dist.set_debug_level_from_env()
    import_from(request.source)
    try:
        fn, args = pickle.loads(request.body)
        answer = (True, fn(request.rank, *args))
        code = 0
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        answer = (False, traceback.format_exc())
        code = 1
    write(request.result, answer)
    return code


def write(path, answer):
    part = path + ".part"
    pathlib.Path(part).write_bytes(pickle.dumps(answer))
    pathlib.Path(part).rename(path)


def spawned(path):
    request = pickle.loads(pathlib.Path(path).read_bytes())
    enter(request)
    sys.exit(perform(request))
