"""1F1B with more micro-batches under way, for links with a delay."""

from typing import Any

from torch.distributed import pipelining

from torch_lowcomm.pipeline.stage import Stage


class Schedule1F1B(pipelining.Schedule1F1B):
    """`torch.distributed.pipelining.Schedule1F1B` that starts more micro-batches before the first backward.

    With 1F1B (PipeDream-Flush: Narayanan et al., ICML 2021, section 2.2) the stage before the last one has two micro-batches
    under way. It waits where a round trip of the link takes longer than one of them computes. Here stage i of K begins with

        min(n_microbatches, K - i + ahead · (K - 1 - i))

    forwards, and keeps the activations of as many micro-batches: `ahead` more for each boundary behind it. A round trip is
    covered from ahead = round trip / (a stage's forward + backward) on. 0 is torch's order. From n_microbatches on all stages but
    the last one run all forwards first, as GPipe does. Gradients are those of torch's schedule bit for bit, for each stage adds
    them in the order of the micro-batches.
    """

    def __init__(self, stage: Stage, n_microbatches: int, *args: Any, ahead: int = 2, **kwargs: Any) -> None:
        """Makes a schedule; all ranks of a pipeline are given the same options.

        Args:
            stage: The rank's stage. torch's PipelineStage waits for its sends and would wait for ever here.
            n_microbatches: Micro-batches of a step.
            *args: As torch's Schedule1F1B.
            ahead: How many micro-batches more a stage starts before its first backward, for each boundary behind it; 0 or more.
            **kwargs: As torch's Schedule1F1B.
        """
        if not isinstance(stage, Stage):
            raise TypeError(f"stage: expected an lc.pipeline.Stage, got {type(stage).__name__}")
        if ahead < 0:
            raise ValueError(f"ahead: expected 0 or more, got {ahead}")
        super().__init__(stage, n_microbatches, *args, **kwargs)
        # The loop of torch 2.11 to 2.15 begins with min(n_microbatches, _num_stages - stage_index) forwards and uses the number
        # of stages for nothing else.
        self._num_stages += ahead * (stage.num_stages - 1 - stage.stage_index)
