"""The means of a stage on each of the two ranks: where its tensors are, and groups to try things on."""

import torch
import torch.distributed as dist

import torch_lowcomm as lc

TOLERANCE = 0.02


class Trial:
    """One rank of a stage. In the dry run, whose device is "cpu", the device and the host are the same."""

    def __init__(self, rank, device):
        self._ranks, self.rank, self.size = rank, rank.rank, rank.size
        self.cuda = device == "cuda"
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        self.devices = ("cpu", "cuda") if self.cuda else ("cpu",)
        if self.cuda:
            # A DeviceMesh takes LOCAL_RANK for the device unless CUDA is in use when it is made.
            torch.cuda.set_device(0)
            torch.zeros(1, device=self.device)

    def init(self, **options):
        """A new default group in place of the last one; `options` are those of lc.Options."""
        self.end()
        options = {"encode_on_device": True, "min_bytes": 0, "seed": 7, **options}
        self._ranks.init("lowcomm", pg_options=lc.Options(**options))

    def alone(self, **options):
        """A default group of this rank alone, in place of the last one."""
        self.end()
        store = dist.HashStore()
        dist.init_process_group("lowcomm", store=store, rank=0, world_size=1, pg_options=lc.Options(**options))

    def compare(self, *trainings):
        """Trains on the host and on the device; returns by how much of the largest weight any two differ.

        Kernels add in other orders, and a code may then be its neighbour.
        """
        facts = {}
        for train in trainings:
            on_host, on_device = train(self.rank, "cpu"), train(self.rank, self.device.type)
            for host, device in zip(on_host, on_device, strict=True):
                host, device = host.detach().float(), device.detach().cpu().float()
                off = float((host - device).abs().max() / host.abs().max())
                facts[train.__name__] = max(off, facts.get(train.__name__, 0.0))
            assert facts[train.__name__] <= (TOLERANCE if self.cuda else 0), facts
        return facts

    def end(self):
        if dist.is_initialized():
            dist.destroy_process_group()

    def either(self, on_a_gpu, dry):
        """A size or a count, which the dry run has less of."""
        return on_a_gpu if self.cuda else dry

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def stats(self, op):
        return lc.stats()[dist.group.WORLD.group_name][op]

    def same_on_both_ranks(self, tensors):
        """Whether tensors are equal bit for bit, by an exact op of host tensors."""
        mine = torch.cat([t.detach().cpu().contiguous().view(torch.uint8).flatten() for t in tensors])
        everybodys = [torch.empty_like(mine) for _ in range(self.size)]
        with lc.exact():
            dist.all_gather(everybodys, mine)
        return all(mine.equal(other) for other in everybodys)


def same_bits(a, b):
    return a.view(torch.uint8).equal(b.view(torch.uint8))


def flat(model):
    """All parameters one behind another, on the host."""
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


class GivenGradients(torch.nn.Module):
    """Parameters whose gradients are drawn on the host: the same bits on any device, whatever its kernels round like."""

    def __init__(self, *shapes):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.given = torch.nn.ParameterList([torch.randn(shape, generator=draw) for shape in shapes])

    def forward(self, step, rank):
        loss = 0
        for number, parameter in enumerate(self.given):
            draw = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
            loss = loss + (parameter * torch.randn(parameter.shape, generator=draw).to(parameter)).sum()
        return loss
