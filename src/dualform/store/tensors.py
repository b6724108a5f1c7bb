"""Safetensors files: written piece by piece, mapped into memory, and checked when a tensor is first used.

The manifest holds the checksum of each file's header, and the header (store/header.py) those of the tensors. The safetensors library
would copy arrays when it writes them, and open a file a second time by its name when it reads them, so both are done here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import xxhash

from dualform.arrays import Array, Bytes
from dualform.errors import StoreDamagedError
from dualform.store.files import BLOCK, DIRECT_FROM, Files, Ranges, WritableFiles, address, read_fitting
from dualform.store.format import File, checksum
from dualform.store.header import TYPES, Arrays, Header, describe, header_bytes, parse_header

if TYPE_CHECKING:
    from torch import Tensor

A = TypeVar("A", "Array", "Tensor")


def write_tensors(
    files: WritableFiles, name: str, tensors: Mapping[str, Sequence[Array]], label: str | None = None
) -> File:
    """Write and flush a file; the pieces of a tensor are joined along their first axis. label: see store/labels.py.

    Tensors of whole blocks come first, so that each begins at a block; the others follow by the size of their elements, so that each is
    aligned. A tensor that is the same memory as another one becomes another name of it.
    """
    aliases = _aliases(tensors)
    tensors = {tensor: pieces for tensor, pieces in tensors.items() if tensor not in aliases}
    sizes = {tensor: sum(piece.nbytes for piece in pieces) for tensor, pieces in tensors.items()}
    order = sorted(tensors, key=lambda one: (sizes[one] % BLOCK > 0, -tensors[one][0].dtype.itemsize, one))
    arrays: Arrays = {}
    size = 0
    for tensor in order:
        end = size + sizes[tensor]
        arrays[tensor] = describe(tensors[tensor], size, end)
        size = end
    checksums = dict.fromkeys(order, checksum(b""))  # placeholders, as long as the checksums to come
    header = Header(arrays, checksums, aliases, label)
    unit = BLOCK if size >= DIRECT_FROM else 8
    with files.create(name, len(header_bytes(header, unit)), size) as output:
        for tensor in order:
            checksums[tensor] = output.append(tensors[tensor])
        raw = header_bytes(header, unit)
        output.finish(raw)
    return File(len(raw) + size, checksum(raw))


def _aliases(tensors: Mapping[str, Sequence[Array]]) -> dict[str, str]:
    """Return the tensors that are the same memory as an earlier one, with the name of that one."""
    aliases: dict[str, str] = {}
    names: dict[tuple[Hashable, ...], str] = {}
    for name, pieces in sorted(tensors.items()):
        if not any(piece.size for piece in pieces):
            continue
        memory = tuple((piece.ctypes.data, piece.shape, piece.strides, piece.dtype) for piece in pieces)
        first = names.setdefault(memory, name)
        if first != name:
            aliases[name] = first
    return aliases


class CheckedFile(ABC, Generic[A]):
    """Arrays by name, mapped into memory. Do not write to them."""

    def __init__(self, files: Files, name: str, file: File):
        """file: what the manifest says of it."""
        self.path = address(files, name)
        """What messages call it."""
        raw = _read_header(files, name, file)
        self._header = _parsed_header(files, name, raw, file)
        self.label = self._header.label
        """Which run the file belongs to, and where in it (store/labels.py); None: it does not say."""
        self._files = files
        self._name = name
        self._content = files.map(name)
        self._data_begin = len(raw)
        self._checked: MutableMapping[str, A] = {}
        if isinstance(self._content, Ranges):
            # What is not mapped from the store itself takes memory or disk: it is let go when nobody uses it
            self._checked = WeakValueDictionary()
        # The file is opened a second time here. Its header holds all checksums, so an equal header means an equal file
        if len(self._content) != file.size or self._content[: len(raw)].tobytes() != raw:
            raise StoreDamagedError(f"{self.path} was replaced while it was being opened.")

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._header.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(sorted([*self._header.arrays, *self._header.aliases]))

    def _stored_name(self, name: str) -> str:
        """Return the name under which an array is stored."""
        return self._header.aliases.get(name, name)

    def _entry(self, name: str) -> dict[str, Any]:
        return self._header.arrays[self._stored_name(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array, as the header has it."""
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> str:
        """Return the type of an array, as the header has it."""
        return str(self._entry(name)["dtype"])

    @staticmethod
    @abstractmethod
    def _array(content: Bytes, dtype: str, shape: tuple[int, ...]) -> A:
        """Return an array of this type and shape from its bytes, not copied."""

    @staticmethod
    @abstractmethod
    def _bytes(array: A) -> Bytes:
        """Return the bytes of an array, not copied."""

    def __getitem__(self, name: str) -> A:
        """Return an array, mapped into memory, so that only pages that are used are read."""
        name = self._stored_name(name)
        array = self._checked.get(name)
        if array is None:
            array = self._checked_array(name)
            self._checked[name] = array
            if isinstance(self._content, Ranges):
                self._content.hold(array, array.nbytes)
        return array

    def _checked_array(self, name: str) -> A:
        array = read_fitting(
            self._files, self._name, lambda: self._unchecked(name), lambda array: self._fits(name, array)
        )
        if array is None:
            raise self._damaged(name)
        return array

    def _fits(self, name: str, array: A) -> bool:
        return checksum(self._bytes(array)) == self._header.checksums.get(name)

    def stretches(self, name: str, rows: int) -> Iterator[tuple[int, A]]:
        """Yield an array in stretches of this many rows, each with the number of its first row.

        The checksum is computed on the way, so that an array larger than memory is read once. Damage is raised instead of the last
        stretch.
        """
        name = self._stored_name(name)
        array = self._unchecked(name)
        is_checked = name in self._checked
        total = xxhash.xxh3_64()
        for low in range(0, max(1, len(array)), rows):
            stretch = array[low : low + rows]
            if not is_checked:
                total.update(self._bytes(stretch).data)
            if not is_checked and low + rows >= len(array):
                if total.hexdigest() != self._header.checksums.get(name):
                    raise self._damaged(name)
                self._checked[name] = array
            yield low, stretch

    def _unchecked(self, name: str) -> A:
        if name not in self:
            raise StoreDamagedError(f"{self.path} is damaged: it has no tensor {name!r}.")
        begin, end = self._entry(name)["data_offsets"]
        content = self._content[self._data_begin + begin : self._data_begin + end]
        return self._array(content, TYPES[self.dtype(name)].name, self.shape(name))

    def _damaged(self, name: str) -> StoreDamagedError:
        return StoreDamagedError(f"{self.path} is damaged: the checksum of {name!r} does not fit.")


class ArrayFile(CheckedFile[Array]):
    """NumPy arrays, for questions that need no PyTorch."""

    @staticmethod
    def _array(content: Bytes, dtype: str, shape: tuple[int, ...]) -> Array:
        return content.view(dtype).reshape(shape)

    @staticmethod
    def _bytes(array: Array) -> Bytes:
        return array.reshape(-1).view(np.uint8)


class TensorFile(CheckedFile["Tensor"]):
    """PyTorch tensors. PyTorch is imported only here: questions to totals are answered before it would be."""

    @staticmethod
    def _array(content: Bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
        import torch

        return torch.from_numpy(content).view(getattr(torch, dtype)).reshape(shape)

    @staticmethod
    def _bytes(array: Tensor) -> Bytes:
        import torch

        data: Bytes = array.reshape(-1).view(torch.uint8).numpy()
        return data


def tensor_checksum(tensor: Tensor) -> str:
    """Return a checksum of a tensor's numbers."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return checksum(flat.view(torch.uint8).numpy())


def read_label(files: Files, name: str, file: File) -> str | None:
    """Return the label of a file, from its header alone."""
    raw = _read_header(files, name, file)
    return _parsed_header(files, name, raw, file).label


def describe_file(files: Files, name: str) -> File:
    """Return what a manifest would say of a file that it does not name."""
    size = files.size(name)
    return File(size, checksum(_header_of(files, name, size)))


def _read_header(files: Files, name: str, file: File) -> bytes:
    """Return the header of a file with its length before it, if it is the one that the manifest knows."""
    path = address(files, name)
    size = files.size(name)
    if size != file.size:
        raise StoreDamagedError(f"{path} is damaged: it has {size:,} bytes, the manifest says {file.size:,}.")
    header = read_fitting(
        files, name, lambda: _header_of(files, name, size), lambda header: checksum(header) == file.checksum
    )
    if header is None:
        raise StoreDamagedError(f"{path} is damaged: the checksum of its header does not fit the manifest.")
    return header


def _header_of(files: Files, name: str, size: int) -> bytes:
    start = files.read_range(name, 0, BLOCK)  # most headers are no longer
    length = 8 + int.from_bytes(start[:8], "little")
    if len(start) < length <= size:
        start += files.read_range(name, len(start), length)
    return start[:length]


def _parsed_header(files: Files, name: str, raw: bytes, file: File) -> Header:
    try:
        return parse_header(raw[8:], file.size - len(raw))
    except (ValueError, RecursionError) as error:
        raise StoreDamagedError(f"{address(files, name)} is damaged: {error}.") from None
