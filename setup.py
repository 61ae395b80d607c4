"""Runs CMake, which owns the list of sources; everything static stands in pyproject.toml."""

import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Configure and build in a fixed `build/` (an editable build passes a temporary one), then copy what it made."""

    def build_extension(self, ext: Extension) -> None:
        build = ROOT / "build"
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), f"-DPython3_EXECUTABLE={sys.executable}"]
        configure += ["-DCMAKE_BUILD_TYPE=" + ("Debug" if os.environ.get("DEBUG") == "1" else "Release")]
        for option in ("LOWCOMM_CUDA", "LOWCOMM_OPENSSL"):
            configure += [f"-D{option}=" + os.environ.get(option, "auto")]
        if not (build / "CMakeCache.txt").exists() and shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        if shutil.which("ccache"):
            configure += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        for command in (configure, ["cmake", "--build", str(build), "--target", "_C", "--parallel", jobs]):
            if subprocess.call(command) != 0:
                raise SystemExit(f"torch_lowcomm: `{' '.join(command[:3])} …` failed; its own message stands above.")
        targets = [pathlib.Path(self.get_ext_fullpath(ext.name)).parent]
        if self.editable_mode:  # setuptools copies the module itself back into the tree, and nothing beside it
            targets.append(ROOT / "torch_lowcomm")
        for target in targets:
            target.mkdir(parents=True, exist_ok=True)
            # By name: the folder may hold the module of another Python too, which shares this build folder.
            for name in (pathlib.Path(self.get_ext_filename(ext.name)).name, "_build_info.py"):
                made = build / "python" / "torch_lowcomm" / name
                # A process may have the old file mapped: replace it, never write into it.
                shutil.copy2(made, target / (name + ".new"))
                (target / (name + ".new")).replace(target / name)


class BinaryDistribution(Distribution):
    """A wheel of this package holds machine code."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    ext_modules=[Extension("torch_lowcomm._C", [])],
    cmdclass={"build_ext": CMakeBuild},
    distclass=BinaryDistribution,
)
