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
from dualform.store import files
from dualform.store import tensors as tensors_module
from dualform.store.files import BLOCK, DIRECT_FROM, HOT, JOINED, STAGE, LocalFiles
from dualform.store.format import File
from dualform.store.header import NAMES

fcntl = pytest.importorskip("fcntl")


def plain(tensors):
    """The file, put together in memory as the format says."""
    whole = {name: np.concatenate(pieces) if len(pieces) > 1 else pieces[0] for name, pieces in tensors.items()}
    names = sorted(tensors, key=lambda name: (whole[name].nbytes % BLOCK > 0, -whole[name].dtype.itemsize, name))
    whole = {name: whole[name] for name in names}
    header = {"__metadata__": {name: xxhash.xxh3_64_hexdigest(whole[name].tobytes()) for name in names}}
    data = b""
    for name, tensor in whole.items():
        offsets = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": offsets}
        data += tensor.tobytes()
    listed = [[name, NAMES[whole[name].dtype.name], list(whole[name].shape)] for name in sorted(whole)]
    text = json.dumps(listed, separators=(",", ":")).encode()
    header["__metadata__"]["dualform.directory"] = xxhash.xxh3_64_hexdigest(text)
    head = json.dumps(header, separators=(",", ":"))
    head = (head + " " * (-(8 + len(head)) % (BLOCK if len(data) >= files.DIRECT_FROM else 8))).encode()
    return len(head).to_bytes(8, "little") + head + data


def write(path, some):
    return tensors_module.write_tensors(LocalFiles(path.parent), path.name, some)


def check(path, tensors):
    """The file is as expected to the byte, and the library finds in it what was given."""
    written = write(path, tensors)
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
    """Memory that begins shortly after a block: what happens to begin at one would be written from where it is."""
    bits = np.random.default_rng(0).integers(0, 2, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8).reshape(-1)
    memory = np.empty(len(bits) + 2 * BLOCK, np.uint8)
    skip = -memory.ctypes.data % BLOCK + 16
    memory[skip : skip + len(bits)] = bits
    return memory[skip : skip + len(bits)].view(dtype).reshape(shape)


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def writing(patch, change):
    """Let os.writev(descriptor, pieces) be change(descriptor, data, write), with all pieces in one that begins at a block."""
    patch.setattr(os, "writev", lambda descriptor, pieces: change(descriptor, joined(pieces), os.write))


def joined(pieces):
    if len(pieces) == 1:
        return pieces[0]
    memory = np.empty(sum(map(len, pieces)) + BLOCK, np.uint8)
    whole = memory[-memory.ctypes.data % BLOCK :][: sum(map(len, pieces))]
    whole[:] = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
    return whole.data


@pytest.fixture
def direct(tmp_path, monkeypatch):
    """The sizes of the direct writes; skips where there are none."""
    with (tmp_path / "probe").open("wb") as file:
        if not files._set_direct(file.fileno(), True):
            pytest.skip("this file system knows no direct writes")
    sizes = []

    def noted(descriptor, data, write):
        if is_direct(descriptor):
            sizes.append(len(data))
        return write(descriptor, data)

    writing(monkeypatch, noted)
    return sizes


# What can go wrong with direct writes, each in its turn; the file is the same


def without_a_name(patch):
    patch.delattr(os, "O_DIRECT", raising=False)


def refused_when_asked(patch):
    ask = fcntl.fcntl

    def refuse(descriptor, command, value=0):
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return ask(descriptor, command, value)

    patch.setattr(fcntl, "fcntl", refuse)


def refused_when_written(patch):
    def refuse(descriptor, data, write):
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data)

    writing(patch, refuse)


def refused_later(patch):
    position = 0

    def refuse(descriptor, data, write):
        nonlocal position
        if is_direct(descriptor) and position:
            raise OSError(errno.EINVAL, "Invalid argument")
        position += 1
        return write(descriptor, data)

    writing(patch, refuse)


def written_by_blocks(patch):
    writing(patch, lambda descriptor, data, write: write(descriptor, data[: 64 * BLOCK]))


def written_in_odd_parts(patch):
    def part(descriptor, data, write):
        if not is_direct(descriptor):
            return write(descriptor, data[:99_999])
        count = write(descriptor, data[:BLOCK])
        odd = count - count // 3
        os.lseek(descriptor, odd - count, os.SEEK_CUR)
        return odd

    writing(patch, part)


def without_a_call_for_several(patch):
    patch.delattr(os, "writev")


def few_in_a_call(patch):
    patch.setattr(files, "PIECES", 2)


WAYS = [
    lambda patch: None,
    without_a_call_for_several,
    few_in_a_call,
    without_a_name,
    refused_when_asked,
    refused_when_written,
    refused_later,
    written_by_blocks,
    written_in_odd_parts,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1000, HOT, DIRECT_FROM, 2 * STAGE + HOT + 5])
def test_the_same_file_in_each_way(tmp_path, monkeypatch, way, size):
    way(monkeypatch)
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


@given(some_tensors(), st.sampled_from(WAYS))
def test_any_tensors_through_a_small_stage(tmp_path_factory, tensors, way):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"DIRECT_FROM": 1, "STAGE": 2 * BLOCK, "HOT": 1000, "JOINED": 100}.items():
            patch.setattr(files, name, value)
        patch.setattr(tensors_module, "DIRECT_FROM", 1)
        way(patch)
        check(tmp_path_factory.mktemp("tensors") / "file", tensors)


@pytest.mark.parametrize("end", [BLOCK, DIRECT_FROM, STAGE, 2 * STAGE])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_it_ends_at_a_block_or_beside_it(tmp_path, end, beyond):
    size = end + beyond
    while (total := len(plain({"a": [noise((size,))]}))) != end + beyond:
        size -= total - end - beyond
    check(tmp_path / "file", {"a": [noise((size,))]})
    assert (tmp_path / "file").stat().st_size == end + beyond


def test_a_header_longer_than_the_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "STAGE", 2 * BLOCK)
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


def test_large_files_are_written_directly_and_small_ones_are_not(tmp_path, direct):
    check(tmp_path / "small", {"a": [noise((DIRECT_FROM - 1,))]})
    assert not direct
    check(tmp_path / "large", {"a": [noise((3 * STAGE - 5,))]})
    assert direct[:2] == [STAGE, STAGE]
    assert 3 * STAGE - 2 * BLOCK < sum(direct) <= 3 * STAGE
    assert not [size for size in direct if size % BLOCK]


def aligned(size):
    """Bytes that begin at a block in memory."""
    memory = np.empty(size + BLOCK, np.uint8)
    skip = -memory.ctypes.data % BLOCK
    memory[skip : skip + size] = noise((size,))
    return memory[skip : skip + size]


@pytest.mark.parametrize("way", WAYS)
def test_whole_blocks_are_written_from_where_they_are(tmp_path, monkeypatch, way):
    way(monkeypatch)
    large = aligned(DIRECT_FROM + 3 * BLOCK)
    beside = {"of blocks": [large[: 70 * BLOCK], large[BLOCK:], noise((2 * BLOCK,))], "odd": [aligned(40 * BLOCK + 7)]}
    check(tmp_path / "file", {**beside, "after": [noise((5, 7), "float16")], "later": [large]})
    check(tmp_path / "crooked", {"a": [large[: 33 * BLOCK + 8], large[: 99 * BLOCK]], "b": [large[8:]]})


@pytest.fixture
def calls(direct, monkeypatch):
    """The calls that were made: where their pieces are in memory, how long they are, and whether they went directly."""
    monkeypatch.undo()  # writes as they are
    found, write = [], os.writev

    def noted(descriptor, pieces):
        count = write(descriptor, pieces)  # an error is not hidden: nothing is noted
        places = [np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces]
        found.append((places, [len(piece) for piece in pieces], is_direct(descriptor)))
        return count

    monkeypatch.setattr(os, "writev", noted)
    return found


def test_nothing_is_copied_that_is_of_whole_blocks_and_all_of_it_goes_in_one_call(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(files, "STAGE", 16 * BLOCK)
    large = aligned(2 * DIRECT_FROM)
    check(tmp_path / "file", {"a": [large, large[:DIRECT_FROM]], "b": [noise((5,))]})
    here, *others = calls
    assert here == ([large.ctypes.data] * 2, [len(large), DIRECT_FROM], True)
    assert not any(directly for *_, directly in others)


def test_so_many_pieces_that_one_call_does_not_take_them(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(files, "JOINED", 1)
    large = aligned(1100 * BLOCK)  # systems take 1024 at a time
    check(tmp_path / "file", {"a": np.split(large, 1100), "b": [noise((5,))]})
    assert [(len(sizes), directly) for _, sizes, directly in calls[:3]] == [(512, True), (512, True), (76, True)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("after", range(4))
def test_other_errors_are_not_hidden(tmp_path, monkeypatch, number, after):
    left = after

    def fail(descriptor, data, write):
        nonlocal left
        if not left:
            raise OSError(number, os.strerror(number))
        left -= 1
        return write(descriptor, data)

    writing(monkeypatch, fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        write(tmp_path / "file", {"a": [noise((2 * STAGE + 5,))]})


def test_refused_in_the_ordinary_way_too(tmp_path, monkeypatch):
    def fail(descriptor, data, write):
        raise OSError(errno.EINVAL, "Invalid argument")

    writing(monkeypatch, fail)
    with pytest.raises(OSError, match="Invalid argument"):
        write(tmp_path / "file", {"a": [noise((STAGE,))]})


@pytest.mark.parametrize("size", [100, STAGE])
def test_it_is_flushed_after_the_last_write(tmp_path, monkeypatch, size):
    events = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append("flushed"))

    def noted(descriptor, data, write):
        events.append("written")
        return write(descriptor, data)

    writing(monkeypatch, noted)
    write(tmp_path / "file", {"a": [noise((size,))]})
    assert events == ["written"] * (len(events) - 1) + ["flushed"]


@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.bool])
def test_buffers_of_every_kind_come_back(tmp_path, kind):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    model.register_buffer("counts", torch.tensor([0, 1, 1]).to(kind))
    dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "run").close()
    [*_, found] = dualform.open(tmp_path / "run", model).model().buffers()
    assert found.dtype == kind
    assert found.tolist() == model.counts.tolist()
