"""The mark of tests that need a GPU."""

import pytest
import torch

from torch_lowcomm import _build_info


def on_a_gpu(test):
    """Skips a test, and says why, where there is no GPU or the extension has no kernels."""
    test = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test)
    test = pytest.mark.skipif(not _build_info.CUDA_ARCHITECTURES, reason="no CUDA kernels in this build")(test)
    return pytest.mark.cuda(test)
