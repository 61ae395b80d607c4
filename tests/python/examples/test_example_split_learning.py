"""examples/split_learning.py: a client's process and a server's."""

import gzip

import pytest
import torch
from example_main import EXAMPLES, run_example


@pytest.fixture
def images(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import images

    return images


@pytest.mark.slow
def test_example_trains(tmp_path, images):
    """All three runs learn, and the coded ones send an eighth of the exact one's bytes or less."""
    if not images.DEBIAN.exists():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    few = ["--images", "240", "--clients", "3", "--concentration", "5", "--rounds", "2", "--batch", "16"]
    arguments = [*few, "--test-images", "500", "--decay", "0.5"]
    outputs, (exact, codes, changes) = run_example("split_learning", tmp_path, *arguments)
    for run, most in (
        (exact, 0.95),
        (codes, 1.0),
        (changes, 1.0),
    ):  # the factor was 0.95 when codes ran over images' ends
        assert sum(run["loss"][-10:]) < most * sum(run["loss"][:10])
        assert run["accuracy"] > 0.2
        assert run["sent_bytes"][-1] == run["from_clients"]
    assert exact["from_clients"] > 8 * codes["from_clients"]
    assert exact["from_server"] > 8 * codes["from_server"]
    assert codes["from_clients"] < changes["from_clients"] < exact["from_clients"] / 4, "first visits take 8 bits"
    assert "fewer bytes, times" in outputs[0]
    assert (tmp_path / "runs" / "split_learning.png").read_bytes().startswith(b"\x89PNG")


def test_every_image_has_one_client(images):
    labels = torch.arange(1000) % 10
    dealt = images.deal(labels, 16, concentration=0.5, seed=3)
    assert sorted(torch.cat(dealt).tolist()) == list(range(1000))
    counts = torch.stack([labels[numbers].bincount(minlength=10) for numbers in dealt]).float()
    assert (counts.max(0).values > 2 * counts.mean(0)).all(), "classes are not spread evenly"


def _idx(name, dimensions, content):
    head = torch.tensor([2049 if len(dimensions) == 1 else 2051, *dimensions]).numpy().astype(">i4").tobytes()
    return name, head + bytes(content)


def test_files_are_read_plain_and_packed(tmp_path, images):
    pixels = [value % 256 for value in range(2 * 28 * 28)]
    for name, content in (
        _idx("train-images-idx3-ubyte", (2, 28, 28), pixels),
        _idx("train-labels-idx1-ubyte", (2,), [7, 3]),
    ):
        (tmp_path / name).write_bytes(content)
    x, labels = images.load(tmp_path, train=True)
    assert x.shape == (2, 1, 28, 28)
    assert labels.tolist() == [7, 3]
    assert torch.allclose(x[0, 0, 0, 5], torch.tensor((5 / 255 - 0.286) / 0.353))
    plain = tmp_path / "train-images-idx3-ubyte"
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert torch.equal(images.load(tmp_path, train=True)[0], x)
    plain.write_bytes(b"not an IDX file")
    with pytest.raises(ValueError, match="expects an IDX file of 3 dimensions"):
        images.load(tmp_path, train=True)
    with pytest.raises(ValueError, match="expects t10k-images-idx3-ubyte or t10k-images-idx3-ubyte.gz"):
        images.load(tmp_path, train=False)
