"""Tiny matrices need no second thread, whose barriers take seconds where other work keeps the cores busy."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
