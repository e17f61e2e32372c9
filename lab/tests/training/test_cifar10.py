"""CIFAR-10 from tiny files of the original format: read exactly, and refused by name when something is wrong."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from depthscope_lab.training.data import cifar10, load_cifar10

PER_FILE = 3


def pixels(number: int) -> tuple[np.ndarray, list[int]]:
    """The images (3, 3072) and classes of the file with this number."""
    generator = np.random.default_rng(number)
    return generator.integers(256, size=(PER_FILE, 3072), dtype=np.uint8), [number, 0, 9]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All six files."""
    for number, name in enumerate(cifar10.FILES):
        images, labels = pixels(number)
        records = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], images], axis=1)
        (tmp_path / name).write_bytes(records.tobytes())
    return tmp_path


def damage(path: Path, at: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(content)


def test_every_pixel_and_class_arrives(folder: Path):
    data = load_cifar10(str(folder), per_file=PER_FILE)
    images = np.concatenate([pixels(number)[0] for number in range(5)]).reshape(-1, 3, 32, 32)
    assert np.array_equal(data.train_images.numpy(), images)
    assert data.train_labels.tolist() == [label for number in range(5) for label in pixels(number)[1]]
    assert np.array_equal(data.test_images.numpy(), pixels(5)[0].reshape(-1, 3, 32, 32))
    assert data.test_labels.tolist() == pixels(5)[1]
    assert data.train_images.dtype == torch.uint8
    before = data.describe()
    path = folder / "data_batch_1.bin"
    damage(path, 100, path.read_bytes()[100] ^ 1)
    assert load_cifar10(str(folder), per_file=PER_FILE).describe() != before


def test_missing_files_are_named(folder: Path):
    for number in (2, 5):
        (folder / f"data_batch_{number}.bin").unlink()
    with pytest.raises(ValueError, match=r"missing: data_batch_2.bin, data_batch_5.bin; is it cifar-10-batches-bin"):
        load_cifar10(str(folder), per_file=PER_FILE)


@pytest.mark.parametrize("kept", [0, 1, 3073, 9000])
def test_a_truncated_file_is_named(folder: Path, kept: int):
    path = folder / "data_batch_4.bin"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"expected 9219 bytes in '.*data_batch_4.bin', got {kept}"):
        load_cifar10(str(folder), per_file=PER_FILE)


def test_a_class_that_is_none_is_refused(folder: Path):
    damage(folder / "data_batch_2.bin", 0, 10)
    with pytest.raises(ValueError, match=r"classes 0 to 9 in '.*data_batch_2.bin', got 10"):
        load_cifar10(str(folder), per_file=PER_FILE)


class Malicious:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_a_pickle_is_not_opened(tmp_path: Path):
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"binary version .*pickles may run any code, and are not read"):
        load_cifar10(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_what_is_no_folder_of_cifar10_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected a folder with CIFAR-10, got '.*nowhere': unpack"):
        load_cifar10(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="got nothing: unpack"):
        load_cifar10(None)
    with pytest.raises(ValueError, match=r"missing: data_batch_1\.bin"):
        load_cifar10(str(tmp_path))
