"""Versions, build, kernels, NCCL, and a two-rank self-test on this machine."""

import argparse
import ctypes
import os
import platform
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_lowcomm import _C, _build_info
from torch_lowcomm._version import __version__
from torch_lowcomm.groups import set_policy

_PATIENCE = timedelta(seconds=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--no-self-test", action="store_true", help="only print the report, without the self-test")


def _self_test() -> list[int]:
    """Runs two ranks here, which ignore the user's policy, sizes and chunks, and keep the choice of kernels; returns their
    exit statuses.
    """
    kept = {name: value for name, value in os.environ.items() if name[:8] != "LOWCOMM_" or name == "LOWCOMM_KERNELS"}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", "from torch_lowcomm.cli import info; info.exchange()", str(store.port)]
    ranks = [subprocess.Popen([*command, str(rank)], env=kept) for rank in range(2)]
    try:
        return [rank.wait(2 * _PATIENCE.total_seconds()) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def exchange() -> None:
    """One of the two ranks: checks the results of an exact and an 8-bit all_reduce."""
    port, rank = map(int, sys.argv[1:])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("lowcomm", store=store, rank=rank, world_size=2, timeout=_PATIENCE)
    x = [torch.randn(100_000, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    errors = []
    for policy in ("", "all_reduce=qsgd8"):
        set_policy(None, policy)
        total = x[rank].clone()
        dist.all_reduce(total)
        errors.append((total - (x[0] + x[1])).abs().max().item())
    if errors[0] != 0 or not 0 < errors[1] < 0.1:
        raise RuntimeError(f"expected no error of an exact exchange and one below .1 in 8 bits, got {errors}")
    dist.destroy_process_group()


def _architectures() -> str:
    """Returns the architectures of the CUDA kernels, made from CMake's words: "sm_80, sm_90, PTX of sm_90"."""
    words = {"real": "sm_{}", "virtual": "PTX of sm_{}", "": "sm_{0}, PTX of sm_{0}"}
    said = []
    for architecture in _build_info.CUDA_ARCHITECTURES.split(";"):
        number, _, kind = architecture.partition("-")
        said.append(words[kind].format(number) if number[:1].isdigit() else architecture)  # or "native", "all"
    return ", ".join(said)


def _devices() -> str:
    """Returns the CUDA versions of torch and the driver, and the GPUs that torch finds."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    driver = _driver()
    return f"{torch.version.cuda} in this torch, {driver or 'none'} in the driver, {', '.join(names) or 'no GPU found'}"


def _driver() -> str:
    """Returns the CUDA version that the driver serves, "12.4"; empty without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:  # needs no cuInit
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _kernels() -> str:
    """Tells what the CUDA kernels were compiled for, and whether the driver is too old for them."""
    if not _build_info.CUDA_ARCHITECTURES:
        return "not in this build"
    version, driver = _build_info.CUDA_VERSION, _driver()
    said = f"compiled for {_architectures()} by CUDA {version}"
    if driver and int(driver.partition(".")[0]) < int(version.partition(".")[0]):
        said += f", which this driver ({driver}) cannot run: build with a CUDA {driver.partition('.')[0]}, or take a newer driver"
    return said


def _coding() -> str:
    asked = os.environ.get("LOWCOMM_ENCODE_ON_DEVICE", "").strip() == "1"
    if asked and _build_info.CUDA_ARCHITECTURES:
        return "coded on their GPU if it has kernels (LOWCOMM_ENCODE_ON_DEVICE=1), else copied and coded by the host"
    name = "LOWCOMM_ENCODE_ON_DEVICE"
    why = f"{name}=1 asks for kernels, which this build has not" if asked else f"{name} is not 1"
    return f"copied and coded by the host ({why})"


def _nccl() -> str:
    if not dist.is_nccl_available():
        return "not in this torch"
    if not torch.cuda.is_available():
        return "finds no GPU"
    return "carries exact ops of CUDA tensors where asked for (nccl=True or LOWCOMM_NCCL=1), else host memory does"


def _secret() -> str:
    """Tells whether connections are encrypted; ValueError for a secret that is none."""
    library, variable = _C.tls_library(), _C.secret_from()
    if not library:
        return "this build has no OpenSSL and takes no secret"
    if not variable:
        return f"none is set, connections are not encrypted (LOWCOMM_SECRET_FILE; {library})"
    return f"of {variable}, TLS 1.3 by {library}"


def main(arguments: argparse.Namespace) -> int:
    """Prints the report. Returns 0; 1 if the self-test fails; ValueError if the environment names kernels that this machine
    does not have, or a secret that is none.
    """
    kernels, secret = _C.kernels(), _secret()
    rows = [
        ("torch_lowcomm", __version__),
        ("wire format", f"version {_C.WIRE_VERSION}"),
        ("torch", f"{torch.__version__} (built for {_build_info.TORCH_VERSION})"),
        ("python", platform.python_version()),
        ("build", f"{_build_info.BUILD_TYPE}, {_build_info.COMPILER}"),
        ("CUDA", _devices()),
        ("CUDA kernels", _kernels()),
        ("CUDA tensors", _coding()),
        ("kernels", f"{kernels} (LOWCOMM_KERNELS={os.environ.get('LOWCOMM_KERNELS', '')})"),
        ("codecs", _C.codec_names()),
        ("NCCL", _nccl()),
        ("secret", secret),
        ("machine", f"{platform.machine()}, {os.cpu_count()} cores"),
    ]
    for name, value in rows:
        print(f"{name:<16}{value}")
    if arguments.no_self_test:
        return 0
    ended = _self_test()
    how = f"FAILED: the ranks ended with {ended[0]} and {ended[1]}" if any(ended) else "passed"
    print(f"{'self-test':<16}two ranks, exact and 8 bits: {how}")
    return 1 if any(ended) else 0
