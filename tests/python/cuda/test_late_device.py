"""Training on a device that does each thing as late as it may leaves, bit for bit, the weights that it leaves on the host.

Who reads what he has not waited for, or lets a copy's source go, has other weights.
"""

import device_trainings as trainings
import fake_cuda
import pytest
import ranks
import torch.distributed as dist

import torch_lowcomm as lc

pytestmark = fake_cuda.needed

DATA_PARALLEL = (
    trainings.ddp,
    trainings.fsdp2,
    trainings.fsdp2_without_overlap,
    trainings.fsdp2_over_hosts,
    trainings.fsdp2_on_one_host,
    trainings.quantized_adam,
)
# Subspaces on a device need a build with kernels.
PIPELINES = (trainings.pipeline, trainings.pipeline_of_changes)
OTHERS = (
    trainings.diloco,
    trainings.diloco_sync,
    trainings.diloco_fragments,
    trainings.messages,
    trainings.coalesced,
    trainings.exact,
)


def _compare(r, several):
    fake_cuda.begin()
    for train in several:
        r.init("lowcomm", pg_options=lc.Options(trainings.POLICY, min_bytes=0, nccl=False))
        on_host, on_device = train(r.rank, "cpu"), train(r.rank, "cuda")
        for host, device in zip(on_host, on_device, strict=True):
            assert device.is_cuda, train
            assert device.detach().cpu().equal(host.detach()), train
        dist.destroy_process_group()


@pytest.mark.later
@pytest.mark.parametrize("several", [DATA_PARALLEL, PIPELINES, OTHERS], ids=["data parallel", "pipelines", "others"])
def test_the_weights_are_the_hosts(several):
    ranks.run_ranks(_compare, 2, several, start="spawn", env=fake_cuda.ENV)
