"""Safetensors files: written piece by piece, mapped into memory, and checked when a tensor is first touched.

The format is the library's, which checks its headers when they are read: 8 bytes of header length, a JSON header, the tensors' bytes. The
header holds each tensor's checksum; the manifest holds the header's. The library would copy arrays when it writes them and open a file by
its name once more when it reads them, so both are done here.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import xxhash

from dualform.arrays import Array, Bytes
from dualform.errors import StoreDamagedError
from dualform.layers.layer import COUNT_LIMIT
from dualform.store.files import BLOCK, DIRECT_FROM, Files, WritableFiles, address
from dualform.store.format import File, checksum, shortened
from dualform.store.labels import ALIASES, DIRECTORY, LABEL

if TYPE_CHECKING:
    from torch import Tensor

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Types by their NumPy names, and as headers call them."""
TYPES = {stored: np.dtype(name) for name, stored in NAMES.items()}
AXES = 32
"""Axes of an array, at most."""

A = TypeVar("A", "Array", "Tensor")
Header = dict[str, dict[str, Any]]


def write_tensors(
    files: WritableFiles, name: str, tensors: Mapping[str, Sequence[Array]], label: str | None = None
) -> File:
    """Write and flush a file; the pieces of a tensor are joined along their first axis. label: see store/labels.py.

    Tensors of whole blocks come first, so that each begins at one, the others by the size of their elements, so that each is aligned.
    Tensors that are the same memory are written once: the others are names for the first of them.
    """
    aliases = _aliases(tensors)
    tensors = {tensor: pieces for tensor, pieces in tensors.items() if tensor not in aliases}
    sizes = {tensor: sum(piece.nbytes for piece in pieces) for tensor, pieces in tensors.items()}
    order = sorted(tensors, key=lambda one: (sizes[one] % BLOCK > 0, -tensors[one][0].dtype.itemsize, one))
    metadata = dict.fromkeys(order, checksum(b""))  # placeholders, as long as the checksums to come
    if label is not None:
        metadata[LABEL] = label
    if aliases:
        metadata[ALIASES] = json.dumps(aliases)
    header: Header = {"__metadata__": metadata}
    size = 0
    for tensor in order:
        header[tensor] = _description(tensors[tensor], size, size + sizes[tensor])
        size += sizes[tensor]
    metadata[DIRECTORY] = _directory(header, aliases)
    unit = BLOCK if size >= DIRECT_FROM else 8
    with files.create(name, len(_header_bytes(header, unit)), size) as output:
        for tensor in order:
            metadata[tensor] = output.append(tensors[tensor])
        head = _header_bytes(header, unit)
        output.finish(head)
    return File(len(head) + size, checksum(head))


def _description(pieces: Sequence[Array], begin: int, end: int) -> dict[str, Any]:
    """Return a tensor's entry in the header."""
    shape = list(pieces[0].shape)
    if len(pieces) > 1:
        shape[0] = sum(len(piece) for piece in pieces)
    return {"dtype": NAMES[pieces[0].dtype.name], "shape": shape, "data_offsets": [begin, end]}


def _aliases(tensors: Mapping[str, Sequence[Array]]) -> dict[str, str]:
    """Return the tensors whose memory is that of another one, by name, with the name of that one."""
    aliases: dict[str, str] = {}
    names: dict[tuple[Hashable, ...], str] = {}
    for name, pieces in sorted(tensors.items()):
        if not any(piece.size for piece in pieces):
            continue
        memory = tuple((piece.ctypes.data, piece.shape, piece.strides, piece.dtype.name) for piece in pieces)
        first = names.setdefault(memory, name)
        if first != name:
            aliases[name] = first
    return aliases


def _directory(header: Header, aliases: Mapping[str, str]) -> str:
    """Return a checksum of the tensors' names, types and shapes: one that is missing or cut short is noticed, even if nobody counts it."""
    names = sorted(name for name in header if name != "__metadata__")
    described: list[list[Any]] = [[name, header[name]["dtype"], header[name]["shape"]] for name in names]
    described += [[name, aliases[name]] for name in sorted(aliases)]
    return checksum(json.dumps(described, separators=(",", ":")).encode())


def _header_bytes(header: Header, unit: int) -> bytes:
    """Return the header with its length before it, padded to whole units."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % unit)
    return len(text).to_bytes(8, "little") + text


class CheckedFile(ABC, Generic[A]):
    """Arrays by name, mapped into memory. Do not write to them."""

    def __init__(self, files: Files, name: str, file: File):
        """file: what the manifest says of it."""
        self.path = address(files, name)
        """What messages call it."""
        header = _read_header(files, name, file)
        self._data_begin = len(header)
        self._arrays, self._checksums, self._aliases = _parse_header(files, name, header, file)
        self.label = self._checksums.pop(LABEL, None)
        """Which run the file belongs to, and where in it (store/labels.py); None: it does not say."""
        self._checked: dict[str, A] = {}
        self._content = files.map(name)
        # The header has the checksums of all tensors: if it is the same, it does not matter that the file was opened again
        if len(self._content) != file.size or self._content[: len(header)].tobytes() != header:
            raise StoreDamagedError(f"{self.path} was replaced while it was being opened.")

    def __contains__(self, name: str) -> bool:
        return name in self._arrays or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(sorted([*self._arrays, *self._aliases]))

    def _stored_name(self, name: str) -> str:
        """Return the name under which an array is stored."""
        return self._aliases.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array, as the header has it."""
        return tuple(self._arrays[self._stored_name(name)]["shape"])

    def dtype(self, name: str) -> str:
        """Return the type of an array, as the header has it."""
        return str(self._arrays[self._stored_name(name)]["dtype"])

    @staticmethod
    @abstractmethod
    def _array(content: Bytes, dtype: str, shape: tuple[int, ...]) -> A:
        """Return an array of this type and shape from its bytes, not copied."""

    @staticmethod
    @abstractmethod
    def _bytes(array: A) -> Bytes:
        """Return the bytes of an array, not copied."""

    def __getitem__(self, name: str) -> A:
        """Return an array, mapped: pages are read as they are used."""
        name = self._stored_name(name)
        if name not in self._checked:
            array = self._unchecked(name)
            self._compare(name, checksum(self._bytes(array)))
            self._checked[name] = array
        return self._checked[name]

    def stretches(self, name: str, rows: int) -> Iterator[tuple[int, A]]:
        """Yield an array in stretches of this many rows, each with the number of its first row.

        The checksum is computed meanwhile, so that an array larger than memory is read once: damage is raised in the place of the
        last stretch.
        """
        name = self._stored_name(name)
        array = self._unchecked(name)
        total = xxhash.xxh3_64()
        for low in range(0, max(1, len(array)), rows):
            stretch = array[low : low + rows]
            if name not in self._checked:
                total.update(self._bytes(stretch).data)
            if name not in self._checked and low + rows >= len(array):
                self._compare(name, total.hexdigest())
                self._checked[name] = array
            yield low, stretch

    def _unchecked(self, name: str) -> A:
        if name not in self:
            raise StoreDamagedError(f"{self.path} is damaged: it has no tensor {name!r}.")
        begin, end = self._arrays[name]["data_offsets"]
        content = self._content[self._data_begin + begin : self._data_begin + end]
        return self._array(content, TYPES[self.dtype(name)].name, self.shape(name))

    def _compare(self, name: str, computed: str) -> None:
        if computed != self._checksums.get(name):
            raise StoreDamagedError(f"{self.path} is damaged: the checksum of {name!r} does not fit.")


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

    return checksum(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def read_label(files: Files, name: str, file: File) -> str | None:
    """Return the label of a file, from its header alone."""
    _, metadata, _ = _parse_header(files, name, _read_header(files, name, file), file)
    return metadata.get(LABEL)


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
    header = _header_of(files, name, size)
    if checksum(header) != file.checksum:
        raise StoreDamagedError(f"{path} is damaged: the checksum of its header does not fit the manifest.")
    return header


def _header_of(files: Files, name: str, size: int) -> bytes:
    start = files.read_range(name, 0, BLOCK)  # most headers are no longer
    length = 8 + int.from_bytes(start[:8], "little")
    if len(start) < length <= size:
        start += files.read_range(name, len(start), length)
    return start[:length]


def _parse_header(files: Files, name: str, header: bytes, file: File) -> tuple[Header, dict[str, str], dict[str, str]]:
    """Return the arrays that a header describes, its metadata, and other names of arrays."""
    try:
        return _arrays_and_metadata(header[8:], file.size - len(header))
    except (ValueError, RecursionError) as error:
        raise StoreDamagedError(f"{address(files, name)} is damaged: {error}.") from None


def _arrays_and_metadata(text: bytes, data_size: int) -> tuple[Header, dict[str, str], dict[str, str]]:
    """Parse a header. Raises ValueError if it does not fit data of this size."""
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the metadata of its header are not texts")
    end = 0
    for begin, array_end, name in sorted(_checked_range(name, array) for name, array in header.items()):
        if begin != end:
            raise ValueError(f"the array {name!r} begins at byte {begin}, expected {end}")
        end = array_end
    if end != data_size:
        raise ValueError(f"its arrays take {end:,} bytes, there are {data_size:,}")
    aliases = _checked_aliases(metadata.pop(ALIASES, "{}"), header)
    if metadata.pop(DIRECTORY, None) != _directory(header, aliases):
        raise ValueError("its arrays are not those that were written")
    return header, metadata, aliases


def _checked_aliases(text: str, header: Header) -> dict[str, str]:
    """Parse the other names of arrays."""
    aliases = json.loads(text)
    if not isinstance(aliases, dict):
        raise ValueError("the other names of its arrays are no JSON object")
    for name, stored in aliases.items():
        if name in header or not isinstance(stored, str) or stored not in header:
            raise ValueError(f"the array {name!r} is another name of an array that is not there")
    return aliases


def _checked_range(name: str, array: object) -> tuple[int, int, str]:
    """Return where an array begins and ends, if its shape and type take just as many bytes."""
    if not isinstance(array, dict) or array.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the array {name!r} is not described as expected")
    shape = array["shape"]
    offsets = array["data_offsets"]
    if not (_are_counts(shape, AXES) and _are_counts(offsets, 2) and len(offsets) == 2):
        raise ValueError(f"shape or place of the array {name!r} are no counts")
    if not isinstance(array["dtype"], str) or array["dtype"] not in TYPES:
        raise ValueError(f"the array {name!r} is of an unknown type")
    begin, end = offsets
    if end - begin != math.prod(shape) * TYPES[array["dtype"]].itemsize:
        raise ValueError(f"the array {name!r} of shape {shortened(shape)} does not take {end - begin:,} bytes")
    return begin, end, name


def _are_counts(values: object, length: int) -> bool:
    """Whether it is a list, at most this long, of numbers that are no larger than a file can be."""
    if not isinstance(values, list) or len(values) > length:
        return False
    return all(type(value) is int and 0 <= value < COUNT_LIMIT for value in values)
