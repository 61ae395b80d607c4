"""Prints a wheel's local version: the minor version of torch that it needs, and of its CUDA kernels their CUDA.

wheel_tag.py build/python/torch_lowcomm/_build_info.py      # torch2.13, or torch2.13.cu130
"""

import runpy
import sys

built = runpy.run_path(sys.argv[1])
kernels = ".cu" + built["CUDA_VERSION"].replace(".", "") if built["CUDA_VERSION"] else ""
print("torch" + ".".join(built["TORCH_VERSION"].split(".")[:2]) + kernels)
