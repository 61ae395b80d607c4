"""Ops of device tensors, by their codes and by copies of their values, have the bits of the same ops on the host."""

import torch
import torch.distributed as dist

from gpu_check.trial import same_bits

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather")
# Without draws: an op draws by its number, and those on the host have others.
CODECS = (
    "sym4:bucket=1024",
    "minmax8:bucket=64",
    "mid4:bucket=512,range=l2",
    "sign1:bucket=256",
    "sym4:bucket=4096,meta=bf16",
    "minmax4:bucket=1024,rotate=1",
    "gauss4",
    "gauss8:bucket=2048",
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def results(t, dtype, n, device, skip):
    """Every op's results on this rank, of the same elements wherever they are, `skip` past an aligned address."""

    def placed(x):
        return torch.empty(skip + x.numel(), dtype=dtype, device=device)[skip:].copy_(x)

    draw = torch.Generator().manual_seed(100 * n + t.rank)
    whole = (torch.randn(t.size * n, generator=draw) * torch.logspace(-3, 3, t.size * n)).to(dtype)
    x, part, zeros = placed(whole), placed(whole[:n]), torch.zeros_like(whole)
    out = {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("average", dist.ReduceOp.AVG)):
        out[f"all_reduce {name}"] = part.clone()
        dist.all_reduce(out[f"all_reduce {name}"], op=op)
        out[f"reduce_scatter {name}"] = placed(zeros[:n])
        dist.reduce_scatter_tensor(out[f"reduce_scatter {name}"], x, op=op)
    out["all_gather"] = placed(zeros)
    dist.all_gather_into_tensor(out["all_gather"], part)
    out["all_gather in place"] = placed(whole)
    own = out["all_gather in place"][t.rank * n : (t.rank + 1) * n]
    dist.all_gather_into_tensor(out["all_gather in place"], own)
    out["all_to_all"] = placed(zeros)
    dist.all_to_all_single(out["all_to_all"], x)
    out["broadcast"] = placed(whole[:n])
    dist.broadcast(out["broadcast"], src=1)
    gathered = [placed(zeros[:n]) for _ in range(t.size)] if t.rank == 0 else None
    dist.gather(part, gathered, dst=0)
    if gathered:
        out["gather"] = torch.cat(gathered)
    return {name: tensor.cpu() for name, tensor in out.items()}


def staged(t):
    wrong, compared = [], 0
    for codec in t.either(CODECS, CODECS[:2]):
        for on in (True, False):
            t.init(policy="; ".join(f"{op}={codec}" for op in OPS), encode_on_device=on, chunk_bytes=65536)
            for dtype in DTYPES:
                for n, skip in t.either(((512, 0), (5000, 1), (130_001, 3)), ((700, 1),)):
                    there, here = results(t, dtype, n, t.device, skip), results(t, dtype, n, "cpu", 0)
                    compared += len(here)
                    wrong += [
                        f"{codec} {name} of {n} {dtype}, staged={on}"
                        for name in here
                        if not same_bits(here[name], there[name])
                    ]
            for op in OPS if t.cuda else ():
                stats = t.stats(op)
                assert (stats["staged_calls"] > 0) == on, (codec, op, stats)
                assert stats["unstaged_because"].keys() == (set() if on else {"encode_on_device=False"}), (
                    codec,
                    op,
                    stats,
                )
    assert not wrong, f"{len(wrong)} of {compared} differ from the host: " + "; ".join(wrong[:8])
    return {"compared": compared}
