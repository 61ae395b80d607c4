"""What tests of the package share."""

import pytest
import torch.distributed as dist


@pytest.fixture
def group():
    dist.init_process_group("lowcomm", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
