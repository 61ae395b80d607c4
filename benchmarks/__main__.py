"""Runs a program of this folder: `python benchmarks PROGRAM …`; without a program it lists them."""

import importlib
import sys
from pathlib import Path

# By name: the module whose main() is the program, and the question that it answers.
PROGRAMS = {
    "convergence": (
        "convergence.cli",
        "loss against bytes of fsdp, ddp, diloco, pipelines and seed_replay, next to exact training",
    ),
    "pretrained": ("convergence.pretrained", "what fsdp and diloco cost a pretrained model on real text"),
    "steps": ("steps.cli", "seconds of a ddp or fsdp step on a slow link, next to gloo; as root"),
    "planned": ("planned", "whether lc.plan predicts the seconds of the other results' rows"),
    "diloco_lab": ("diloco.lab", "outer loops on slow links next to torchft's, with their losses; as root"),
    "diloco_late": ("diloco.late", "what a site that stands still costs the others, with a quorum; as root"),
    "pipelines": ("pipelines.cli", "seconds of a pipeline's step on slow links, next to torch's stages; as root"),
    "stable_rank": ("subspace.stable_rank", "how low the rank of a pretrained decoder's projections and gradients is"),
    "subspace_adam": ("subspace.adam", "what a step of lc.SubspaceAdamW costs next to torch's fused AdamW"),
    "subspace_links": ("subspace.links", "subspace pipelines on a link 15 times too slow, and generation; as root"),
    "seed_replay_smollm2": ("seed_replay.smollm2", "SmolLM2 tuned by seed replay and by back-propagation under ddp"),
    "seed_replay_cost": (
        "seed_replay.cost",
        "what seed_replay costs beyond its forward passes, and with quantized weights",
    ),
    "codec_errors": ("codec.errors", "each codec's error at how many bits, on tensors from a training"),
    "codec_peers": ("codec.peers", "speed of codecs next to FBGEMM and pi-quant"),
    "linklab": ("linklab.cli", "collectives, and any program, on links made of network namespaces; as root"),
    "tcp_links": ("linklab.tcp_links", "what the transport makes of far, lossy, full and busy links; as root"),
    "faults": ("faults.cli", "whether every op ends every fault as promised; as root"),
    "tcp_faults": ("faults.tcp.cli", "every fault of groups over transport tcp, and who is no rank; as root"),
    "every": ("every", "runs every program that README.md lists"),
    "pages": ("pages", "whether the figures of all pages are those of the results"),
}
_ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Runs the program that the first argument names; returns its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        for name, (_, question) in PROGRAMS.items():
            print(f"  {name:<20}{question}")
        return 0 if arguments else 2
    name, *others = arguments
    if name not in PROGRAMS:
        raise SystemExit(f"benchmarks: expected one of {', '.join(PROGRAMS)}, got {name!r}")
    # Models and texts are the examples'; the faults' ranks are started as the tests' are.
    sys.path[:1] = [str(_ROOT / folder) for folder in ("benchmarks", "examples", "tests/python")]
    sys.argv = [f"benchmarks {name}", *others]
    from linklab import LabError

    try:
        return importlib.import_module(PROGRAMS[name][0]).main()
    except LabError as error:
        raise SystemExit(f"benchmarks {name}: {error}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
