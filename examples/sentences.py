"""Sentences with a class each: lines of Python's own library, movie reviews, or a file of one's own."""

from __future__ import annotations

import dataclasses
import random
import sysconfig
import tarfile
import tokenize
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

VALIDATION = 1000  # sentences at most
REVIEWS = "movieReviewSnippets_GroundTruth.txt"


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Pairs of a sentence and the index of its class.

    Attributes:
        classes: A word each, which a language model has for its answer.
        prompt: Text in which the model sees a sentence, `{}`; its next token is the answer.
        train: As many of each class.
        validation: Others, as many of each class.
    """

    classes: tuple[str, ...]
    prompt: str
    train: list[tuple[str, int]]
    validation: list[tuple[str, int]]

    def batch(self, size: int, *key: object) -> list[tuple[str, int]]:
        """Training pairs; equal keys give equal ones."""
        draw = random.Random(" ".join(map(str, key)))
        return [self.train[draw.randrange(len(self.train))] for _ in range(size)]


def load(path: Path | None = None) -> Sentences:
    """Reads sentences and splits them, the same way on every machine.

    Args:
        path: None reads lines of Python's library: comments and code. An archive `vaderSentiment-*.tar.gz` is searched for its
            movie reviews, good and bad. Any other file has a sentence a line: its class, a tab, and the text.

    Raises:
        ValueError: When there is no such file, or no two classes in it; one sentence.
    """
    prompt = "{} It was"
    if path is None:
        pairs, prompt = list(library_lines()), "{} This is"
    elif not path.is_file():
        raise ValueError(f"--data expects a file, got {path}, which does not exist")
    elif path.name.endswith(".tar.gz"):
        pairs = list(reviews(path))
    else:
        lines = [line.partition("\t") for line in path.read_text("utf-8").splitlines() if line.strip()]
        pairs = [(text.strip(), word.strip()) for word, _, text in lines]
    classes = tuple(sorted({word for _, word in pairs}))
    if len(classes) < 2 or not all(classes) or not all(text for text, _ in pairs):
        found = ", ".join(map(repr, classes[:5])) or "none"
        raise ValueError(f"--data expects lines of a class, a tab and a sentence, of two classes or more, got {found}")
    random.Random(0).shuffle(pairs)
    rarest = min(sum(word == one for _, word in pairs) for one in classes)
    kept = [[text for text, word in pairs if word == one][:rarest] for one in classes]
    indexed = [(text, index) for texts in zip(*kept, strict=True) for index, text in enumerate(texts)]
    held_out = min(VALIDATION, len(indexed) // 5)
    return Sentences(classes, prompt, train=indexed[held_out:], validation=indexed[:held_out])


def library_lines(files: int = 60) -> Iterator[tuple[str, str]]:
    """Lines of 20 to 100 characters of the library's first files, comments without their mark."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.glob("*.py"))[:files]:
        with file.open("rb") as source:
            for token in tokenize.tokenize(source.readline):
                line = token.line.strip()
                text = line.strip("#-= ")
                if not line.startswith(token.string) or not 20 < len(text) < 100:
                    continue
                if token.type == tokenize.COMMENT:
                    yield text, "comment"
                elif token.type == tokenize.NAME and "#" not in line:
                    yield text, "code"


def reviews(archive: Path) -> Iterator[tuple[str, str]]:
    """Sentences about films that twenty people found good or bad on average (rating above 1 or below -1 of 4)."""
    with tarfile.open(archive) as outer:
        inner = [member for member in outer if member.name.endswith(".tar.gz")]
        if not inner:
            raise ValueError(f"--data expects an archive with {REVIEWS} inside, got {archive}")
        packed = outer.extractfile(inner[0]).read()
    with tarfile.open(fileobj=BytesIO(packed)) as tar:
        member = next(member for member in tar if member.name.endswith(REVIEWS))
        text = tar.extractfile(member).read().decode("latin-1")
    for line in text.splitlines():
        _, rating, sentence = line.split("\t", 2)
        if abs(float(rating)) > 1:
            yield sentence.strip(), "great" if float(rating) > 0 else "terrible"
