"""The build, and the device it is for."""

import torch

from torch_lowcomm import _C, _build_info


def info(t):
    """The extension has kernels where there is a GPU."""
    facts = {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "host_kernels": _C.kernels(),
        "cuda_architectures": _build_info.CUDA_ARCHITECTURES,
    }
    if t.cuda:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
        }
        assert _build_info.CUDA_ARCHITECTURES, "expected an extension with CUDA kernels, got one without"
    return facts
