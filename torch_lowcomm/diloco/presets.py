"""The options of published outer loops: a function a paper, each of which returns keyword arguments.

    opt = lc.DiLoCoX(inner, model=model, **lc.diloco.presets.diloco_x(rank=64))
    opt = lc.DiLoCoX(inner, model=model, **lc.diloco.presets.streaming() | {"codec": "gauss2"})

A number is the paper's where the function says so, and our choice elsewhere. Every `sync_every` is H, in inner steps.
"""

from typing import Any

INT4 = "sym4:bucket=128"
TWO_BITS = "gauss2"


def diloco(*, sync_every: int = 500) -> dict[str, Any]:
    """DiLoCo (Douillard et al., arXiv 2311.08105): waits for an average in float32.

    The paper's: H = 500; outer Nesterov with γ = 0.7 and μ = 0.9; AdamW inside.
    """
    return {"sync_every": sync_every, "mode": "sync", "outer_lr": 0.7, "outer_momentum": 0.9, "codec": None}


def streaming(
    *, sync_every: int = 100, fragments: int = 4, fragment_sync_delay: int = 5, fragment_update_alpha: float = 0.5
) -> dict[str, Any]:
    """Streaming DiLoCo (Douillard et al., arXiv 2501.18512): fragments in turn, applied later, mixed with the rank's own.

    The paper's: 4 bits an element (a float type there, the codec "sym4" with error feedback here), an average that is mixed in
    by half. It cuts fragments by layers; here they are `fragments` parts of about equal size. H, their number and the delay are
    our choice.
    """
    return diloco(sync_every=sync_every) | {
        "mode": "restart",
        "codec": INT4,
        "fragments": fragments,
        "fragment_sync_delay": fragment_sync_delay,
        "fragment_update_alpha": fragment_update_alpha,
    }


def diloco_x(
    *, sync_every: int = 125, rank: int | None = None, min_rank: int = 2, sync_warmup: int = 3
) -> dict[str, Any]:
    """DiLoCoX (arXiv 2506.21263): 4 bits with error feedback, an interval late, of factors whose rank adapts.

    The paper's (section 4.1.3): H = 125, 4 bits, one outer step of delay. For its 107B model r = 2,048, a quarter of the width,
    with adaptive rank and interval (section 2.4.3; a window of 5); for OPT-1.3B no factors, which is `rank` None.
    It gives no outer momentum: with a delay 0.6 is our choice.

    Args:
        sync_every: H_1, the interval to begin with.
        rank: r_1, the rank to begin with; None sends no factors.
        min_rank: The least rank.
        sync_warmup: Number of first outer steps that wait: a tenth of all is our choice.
    """
    options = {
        "sync_every": sync_every,
        "mode": "continue",
        "outer_lr": 0.7,
        "outer_momentum": 0.6,
        "codec": INT4,
        "error_feedback": True,
        "sync_warmup": sync_warmup,
    }
    if rank is None:
        return options
    return options | {"rank": rank, "min_rank": min_rank, "adapt_rank": True, "adapt_sync_every": True}


def sparse_loco(*, sync_every: int = 50, keep: int = 64) -> dict[str, Any]:
    """SparseLoCo (Sarfi et al., arXiv 2508.15706): the largest pseudo-gradients in 2 bits; error feedback in place of momentum.

    The paper's: `keep` of every 4,096 elements, 1 to 3 %, 2 bits a value, β = 0.95, γ = 1, no outer momentum. H is our choice.
    """
    return {
        "sync_every": sync_every,
        "mode": "sync",
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "codec": f"topk:chunk=4096,keep={keep},values=sym2",
        "error_feedback": 0.95,
    }


def mu_loco(*, sync_every: int = 30) -> dict[str, Any]:
    """MuLoCo (Thérien et al., arXiv 2505.23725): DiLoCo in 2 bits around Muon (`torch.optim.Muon`; docs/diloco.md).

    The paper's: H = 30, 2 bits an element, with error feedback. "gauss2" loses so little that it goes without; add
    `{"error_feedback": True}` for the paper's way.
    """
    return diloco(sync_every=sync_every) | {"codec": TWO_BITS}
