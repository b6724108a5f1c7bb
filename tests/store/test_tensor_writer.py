import errno
import json
import os

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open

import dualform
from dualform.store import tensor_writer
from dualform.store.format import File
from dualform.store.tensor_writer import JOINED, NAMES, write_tensors


def plain(tensors):
    """The file, put together in memory as the format says."""
    whole = {name: np.concatenate(pieces) if len(pieces) > 1 else pieces[0] for name, pieces in tensors.items()}
    names = sorted(tensors, key=lambda name: (-whole[name].dtype.itemsize, name))
    header = {"__metadata__": {name: xxhash.xxh3_64_hexdigest(whole[name].tobytes()) for name in names}}
    data = b""
    for name in names:
        tensor = whole[name]
        offsets = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": offsets}
        data += tensor.tobytes()
    listed = [[name, NAMES[whole[name].dtype.name], list(whole[name].shape)] for name in sorted(whole)]
    text = json.dumps(listed, separators=(",", ":")).encode()
    header["__metadata__"]["dualform.directory"] = xxhash.xxh3_64_hexdigest(text)
    head = json.dumps(header, separators=(",", ":"))
    head = (head + " " * (-len(head) % 8)).encode()
    return len(head).to_bytes(8, "little") + head + data


def check(path, tensors):
    """The file is as expected to the byte, and the library finds in it what was given."""
    written = write_tensors(path, tensors)
    content, expected = path.read_bytes(), plain(tensors)
    assert len(content) == len(expected)
    assert content == expected, next(i for i, (a, b) in enumerate(zip(content, expected, strict=True)) if a != b)
    head = 8 + int.from_bytes(content[:8], "little")
    assert written == File(len(content), xxhash.xxh3_64_hexdigest(content[:head]))
    with safe_open(path, "np") as file:
        assert sorted(file.keys()) == sorted(tensors)
        for name, pieces in tensors.items():
            np.testing.assert_array_equal(file.get_tensor(name), np.concatenate(pieces) if pieces[1:] else pieces[0])


def noise(shape, dtype="uint8"):
    bits = np.random.default_rng(0).integers(0, 2, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    return bits.reshape(-1).view(dtype).reshape(shape)


def writing(patch, change):
    """Let each write be change(descriptor, data, write)."""
    write = tensor_writer._write_some
    patch.setattr(tensor_writer, "_write_some", lambda descriptor, data: change(descriptor, data, write))


@pytest.mark.parametrize(
    ("size", "most"), [(1000, 1), (1000, 999), (JOINED, 999), (3 * JOINED + 5, 999), (JOINED, 1 << 30)]
)
def test_a_system_that_writes_a_part_at_a_time(tmp_path, monkeypatch, size, most):
    writing(monkeypatch, lambda descriptor, data, write: write(descriptor, data[:most]))
    pieces = np.split(noise((size,)), [0, size // 3, size // 3 + 7, size // 2])
    check(tmp_path / "file", {"a": pieces, "b": [noise((size // 20, 3), "float16")] * 2})


@st.composite
def some_tensors(draw):
    tensors = {}
    for name in draw(st.lists(st.text(max_size=5), unique=True, max_size=4)):
        rest = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4))
        pieces = draw(st.lists(st.sampled_from([0, 1, 2, 9, 300, 2000]), min_size=1, max_size=6))
        dtype, order = draw(st.sampled_from(sorted(NAMES))), draw(st.sampled_from("CF"))
        tensors[name] = [np.asarray(noise((rows, *rest), dtype), order=order) for rows in pieces]
    return tensors


@given(some_tensors(), st.sampled_from([1, 100, JOINED]))
def test_any_tensors(tmp_path_factory, tensors, joined):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_writer, "JOINED", joined)
        check(tmp_path_factory.mktemp("tensors") / "file", tensors)


def test_a_long_header(tmp_path):
    check(tmp_path / "file", {f"tensor {i}": [noise((i, 5), "float64")] for i in range(500)})


def test_no_tensors_empty_tensors_scalars_views(tmp_path):
    matrix = noise((600, 700), "float32")
    check(tmp_path / "none", {})
    check(tmp_path / "empty", {"a": [noise((0, 3))], "b": [noise((2, 0), "int64")] * 3})
    check(tmp_path / "scalar", {"a": [np.array(3.5)], "b": [np.array(True)]})
    check(tmp_path / "views", {"a": [matrix.T], "b": [matrix[::2], matrix[:0], matrix[:5]], "c": [matrix[:, 3]] * 9})


def test_many_small_pieces_beside_large_ones(tmp_path):
    small, large = [noise((1, 40), "int16")] * 5000, noise((JOINED, 40), "int16")
    check(tmp_path / "file", {"a": [*small, large, *small, large, large]})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EINVAL])
@pytest.mark.parametrize("after", range(3))
def test_errors_are_not_hidden(tmp_path, monkeypatch, number, after):
    left = after

    def fail(descriptor, data, write):
        nonlocal left
        if not left:
            raise OSError(number, os.strerror(number))
        left -= 1
        return write(descriptor, data)

    writing(monkeypatch, fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_tensors(tmp_path / "file", {"a": [noise((JOINED + 5,)), noise((JOINED,))]})


@pytest.mark.parametrize("size", [100, 4 * JOINED])
def test_it_is_flushed_after_the_last_write(tmp_path, monkeypatch, size):
    events = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append("flushed"))

    def noted(descriptor, data, write):
        events.append("written")
        return write(descriptor, data)

    writing(monkeypatch, noted)
    write_tensors(tmp_path / "file", {"a": [noise((size,))]})
    assert events == ["written"] * (len(events) - 1) + ["flushed"]


@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.bool])
def test_buffers_of_every_kind_come_back(tmp_path, kind):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    model.register_buffer("counts", torch.tensor([0, 1, 1]).to(kind))
    dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "run").close()
    [*_, found] = dualform.open(tmp_path / "run", model).primal().buffers()
    assert found.dtype == kind
    assert found.tolist() == model.counts.tolist()
