"""Programs that are built on one machine and run on another: `make gpu-carry` packs them, `make gpu-check` finds them.

python tests/python/gpu_check/carry.py build-carry gpu-carry
"""

import lzma
import subprocess
import sys
from pathlib import Path

MOST_BYTES = 45 << 20  # of all packed files
EXTENSION = Path("python") / "torch_lowcomm"
PROGRAMS = ("cuda_tests", "cuda_perf")


def pack(build, folder):
    """Strips and compresses the extension, its `_build_info.py` and PROGRAMS of a build folder; returns the bytes.

    Raises:
        ValueError: A file is missing, or all of them are too large to carry.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.xz"):
        old.unlink()
    extensions = list((build / EXTENSION).glob("_C*.so"))
    if len(extensions) != 1:
        raise ValueError(f"gpu-carry: expected one extension in {build / EXTENSION}, got {len(extensions)}")
    for path in (extensions[0], build / EXTENSION / "_build_info.py", *(build / program for program in PROGRAMS)):
        if not path.exists():
            raise ValueError(f"gpu-carry: expected {path}, got no such file")
        stripped = folder / path.name
        if path.suffix == ".py":
            stripped.write_bytes(path.read_bytes())
        else:
            subprocess.run(["strip", "-o", stripped, path], check=True)
        (folder / f"{path.name}.xz").write_bytes(lzma.compress(stripped.read_bytes(), preset=6))
        stripped.unlink()
    size = sum(path.stat().st_size for path in folder.glob("*.xz"))
    if size > MOST_BYTES:
        raise ValueError(f"gpu-carry: expected at most {MOST_BYTES >> 20} MiB, got {size / 2**20:.1f}")
    return size


def unpack(folder, package, programs):
    """Puts the extension and `_build_info.py` into `package`, and PROGRAMS into `programs`."""
    programs.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.xz"):
        name = path.name.removesuffix(".xz")
        target = (programs if name in PROGRAMS else package) / name
        new = target.with_name(f"{name}.new")  # a process may have the old one mapped
        new.write_bytes(lzma.decompress(path.read_bytes()))
        new.chmod(0o755)
        new.replace(target)


if __name__ == "__main__":
    try:
        print(f"{sys.argv[2]}: {pack(Path(sys.argv[1]), Path(sys.argv[2])) / 2**20:.1f} MiB")
    except ValueError as why:
        sys.exit(str(why))
