"""CIFAR-10 from tiny files of the original formats: read exactly, and refused by name when something is wrong."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from depthscope_lab.training.data import load_cifar10

PER_FILE = 3
NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def pixels(number: int) -> tuple[np.ndarray, list[int]]:
    """The images (3, 3072) and classes of the file with this number."""
    generator = np.random.default_rng(number)
    return generator.integers(256, size=(PER_FILE, 3072), dtype=np.uint8), [number, 0, 9]


def write_binary(folder: Path, number: int) -> None:
    images, labels = pixels(number)
    records = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], images], axis=1)
    (folder / f"{NAMES[number]}.bin").write_bytes(records.tobytes())


def write_pickle(folder: Path, number: int, protocol: int = 2) -> None:
    images, labels = pixels(number)
    content = {b"batch_label": b"training batch", b"labels": labels, b"data": images, b"filenames": [b"a.png"] * 3}
    (folder / NAMES[number]).write_bytes(pickle.dumps(content, protocol=protocol))


def python2_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """As Python 2's cPickle wrote the original files: text is bytes (opcode U or T), numpy is `numpy.core`."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def whole(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + whole(0) + whole(1) + b"tR"
    dtype += b"(" + whole(3) + text(b"|") + b"NNN" + whole(-1) + whole(-1) + whole(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + whole(0) + b"t" + text(b"b") + b"tR"
    array += b"(" + whole(1) + b"(" + whole(images.shape[0]) + whole(images.shape[1]) + b"t" + dtype + b"\x89"
    array += text(images.tobytes()) + b"tb"
    listed = b"](" + b"".join(whole(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


@pytest.fixture(params=["binary", "pickle", "python 3 pickle", "hub", "saved"])
def complete(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """All six files in one of the formats."""
    if request.param in ("hub", "saved"):
        return write_dataset(tmp_path, parquet=request.param == "hub")
    for number in range(6):
        if request.param == "binary":
            write_binary(tmp_path, number)
        else:
            write_pickle(tmp_path, number, protocol=2 if request.param == "pickle" else 4)
    return str(tmp_path)


def write_dataset(folder: Path, parquet: bool) -> str:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    splits = {}
    for split, numbers in (("train", range(5)), ("test", [5])):
        images = np.concatenate([pixels(number)[0] for number in numbers])
        labels = [label for number in numbers for label in pixels(number)[1]]
        pictures = [Image.fromarray(image.reshape(3, 32, 32).transpose(1, 2, 0)) for image in images]
        splits[split] = datasets.Dataset.from_dict({"img": pictures, "label": labels}, features=features)
        if parquet:
            (folder / "plain_text").mkdir(exist_ok=True)
            splits[split].to_parquet(folder / "plain_text" / f"{split}-00000-of-00001.parquet")
    if not parquet:
        datasets.DatasetDict(splits).save_to_disk(folder)
    return f"hf:{folder}"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


def test_every_pixel_and_class_arrives(complete: str):
    data = load_cifar10(complete, per_file=PER_FILE)
    images = np.concatenate([pixels(number)[0] for number in range(5)]).reshape(-1, 3, 32, 32)
    labels = [label for number in range(5) for label in pixels(number)[1]]
    assert np.array_equal(data.train_images.numpy(), images)
    assert data.train_labels.tolist() == labels
    assert np.array_equal(data.test_images.numpy(), pixels(5)[0].reshape(-1, 3, 32, 32))
    assert data.test_labels.tolist() == pixels(5)[1]
    assert data.train_images.dtype == torch.uint8
    assert data.note == ""


def test_the_format_does_not_change_the_fingerprint(tmp_path: Path):
    for number in range(6):
        for kind, write in (("b", write_binary), ("p", write_pickle)):
            (tmp_path / kind).mkdir(exist_ok=True)
            write(tmp_path / kind, number)
    found = [load_cifar10(str(tmp_path / kind), per_file=PER_FILE).describe() for kind in "bp"]
    assert found[0] == found[1]
    write_binary(tmp_path / "b", 0)
    content = bytearray((tmp_path / "b" / "data_batch_1.bin").read_bytes())
    content[100] ^= 1
    (tmp_path / "b" / "data_batch_1.bin").write_bytes(content)
    assert load_cifar10(str(tmp_path / "b"), per_file=PER_FILE).describe() != found[0]


def test_a_pickle_of_python_2_is_read(tmp_path: Path):
    for number in range(6):
        (tmp_path / NAMES[number]).write_bytes(python2_pickle(*pixels(number)))
    data = load_cifar10(str(tmp_path), per_file=PER_FILE)
    assert np.array_equal(data.test_images.numpy().reshape(3, -1), pixels(5)[0])
    assert data.test_labels.tolist() == pixels(5)[1]


@pytest.mark.parametrize("write", [write_binary, write_pickle])
def test_missing_files_are_named_and_used_without_only_if_asked(tmp_path: Path, write):
    for number in (0, 3, 5):
        write(tmp_path, number)
    with pytest.raises(ValueError, match=r"missing: data_batch_2\S*, data_batch_3\S*, data_batch_5\S*; --allow"):
        load_cifar10(str(tmp_path), per_file=PER_FILE)
    data = load_cifar10(str(tmp_path), per_file=PER_FILE, allow_incomplete=True)
    assert data.train_labels.tolist() == [0, 0, 9, 3, 0, 9]
    assert "data_batch_2" in data.note


def test_without_training_or_test_files_there_is_nothing_to_use(tmp_path: Path):
    write_binary(tmp_path, 5)
    with pytest.raises(ValueError, match="at least one training file"):
        load_cifar10(str(tmp_path), per_file=PER_FILE, allow_incomplete=True)


def test_an_incomplete_dataset_is_refused(tmp_path: Path):
    source = write_dataset(tmp_path, parquet=True)
    with pytest.raises(ValueError, match=r"expected 20 images in the train split .* got 15; --allow-incomplete"):
        load_cifar10(source, per_file=4)
    assert len(load_cifar10(source, per_file=4, allow_incomplete=True).train_images) == 15


@pytest.mark.parametrize("write", [write_binary, write_pickle])
@pytest.mark.parametrize("kept", [0, 1, 500, 3073, 9000])
def test_a_truncated_file_is_named_even_if_incomplete_is_allowed(tmp_path: Path, write, kept: int):
    for number in range(6):
        write(tmp_path, number)
    path = next(tmp_path.glob("data_batch_4*"))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"data_batch_4(\.bin)?'"):
        load_cifar10(str(tmp_path), per_file=PER_FILE, allow_incomplete=True)


def test_a_class_that_is_none_is_refused(tmp_path: Path):
    for number in range(6):
        write_binary(tmp_path, number)
    content = bytearray((tmp_path / "data_batch_2.bin").read_bytes())
    content[0] = 10
    (tmp_path / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"classes 0 to 9 in '.*data_batch_2.bin', got 10"):
        load_cifar10(str(tmp_path), per_file=PER_FILE)


class Malicious:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def by_name(module: bytes, name: bytes, argument: bytes) -> bytes:
    return b"c" + module + b"\n" + name + b"\n(U" + bytes([len(argument)]) + argument + b"tR."


@pytest.mark.parametrize(
    ("module", "name"), [(b"os", b"system"), (b"builtins", b"eval"), (b"numpy", b"load"), (b"numpy.core", b"x")]
)
def test_a_pickle_that_names_a_function_is_refused_unrun(tmp_path: Path, module: bytes, name: bytes):
    for number in range(6):
        write_pickle(tmp_path, number)
    ran = tmp_path / "ran"
    (tmp_path / "data_batch_3").write_bytes(by_name(module, name, f"touch {ran}".encode()))
    with pytest.raises(ValueError, match=rf"refused to read '.*data_batch_3'.*{module.decode()}.{name.decode()}"):
        load_cifar10(str(tmp_path), per_file=PER_FILE)
    assert not ran.exists()


def test_a_malicious_object_inside_a_true_file_is_refused_unrun(tmp_path: Path):
    for number in range(6):
        write_pickle(tmp_path, number)
    images, labels = pixels(0)
    ran = tmp_path / "ran"
    content = pickle.dumps({b"data": images, b"labels": labels, b"more": Malicious(ran)}, protocol=2)
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(ValueError, match=r"refused to read '.*data_batch_1'"):
        load_cifar10(str(tmp_path), per_file=PER_FILE)
    assert not ran.exists()
    pickle.loads(content)  # it would have run
    assert ran.exists()


@pytest.mark.parametrize(
    "content",
    [
        {b"data": np.zeros((3, 3072), dtype=np.float32), b"labels": [0, 1, 2]},
        {b"data": np.zeros((3, 100), dtype=np.uint8), b"labels": [0, 1, 2]},
        {b"data": np.zeros((3, 3072), dtype=np.uint8), b"labels": [0, 1]},
        {b"data": np.zeros((3, 3072), dtype=np.uint8), b"labels": [0, 1, -1]},
        {b"labels": [0, 1, 2]},
        [1, 2],
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content):
    for number in range(6):
        write_pickle(tmp_path, number)
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ValueError, match=r"expected '.*test_batch' to have data"):
        load_cifar10(str(tmp_path), per_file=PER_FILE)


def test_what_is_no_folder_of_cifar10_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected a folder with CIFAR-10, got '.*nowhere'"):
        load_cifar10(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"expected data_batch_1\.bin"):
        load_cifar10(str(tmp_path))
    with pytest.raises(ValueError, match=r"could not load the train split of the dataset '.*nowhere'"):
        load_cifar10(f"hf:{tmp_path / 'nowhere'}")
