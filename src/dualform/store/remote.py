"""A store at an address, s3:// and the like: byte ranges are read through obstore and kept in a cache on this machine.

Files are read in blocks, or in ranges that are larger than a block, and never as a whole unless all of it is asked for. What comes is
checked by its readers, by the checksums of the store. JSON files, which name the others, are read anew each time; with them, what is
known about the sizes and versions of the other files is asked for anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
from cachetools import LRUCache

from dualform.arrays import Bytes
from dualform.errors import StoreDamagedError, StoreError, StoreMissingError, StorePermissionError
from dualform.store.cache import Cache
from dualform.store.files import LocalFiles, Ranges, address

try:
    import obstore
    from obstore.exceptions import (
        BaseError,
        GenericError,
        PermissionDeniedError,
        UnauthenticatedError,
    )
    from obstore.store import from_url
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "obstore":
        raise
    raise StoreError(
        "recordings at an address (s3://, gs://, az://, https://) need the package obstore, which is not installed: "
        "pip install 'dualform[remote]'."
    ) from error

if TYPE_CHECKING:
    from obstore.store import ObjectStore

BLOCK = 1 << 20
"""Shorter slices are cut from blocks of this size, so that many small tensors take few requests."""
REQUEST = 4 << 20
"""Longer ranges are read in pieces of this size, several at a time."""
ALIGNED = 64
"""Bytes of the longest vector registers."""
BLOCKS_HELD = 64
"""This many blocks stay mapped."""
HELD_BYTES = 512 << 20
"""Tensors of this size together stay mapped, the last ones that were read; others as long as somebody uses them."""
FETCHERS = 16
"""Requests for whole files that are under way at a time."""
TRIES = 5
"""An answer that breaks off is asked for this many times. (What the server refuses, obstore tries again itself.)"""
FIRST_WAIT = 0.1
"""Seconds before the second try; before each further one twice as many."""
CLIENT: dict[str, Any] = {"allow_http": True, "connect_timeout": "10s", "read_timeout": "30s", "timeout": "10m"}
RETRIES: dict[str, Any] = {
    "max_retries": 6,
    "retry_timeout": timedelta(minutes=2),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=10), "base": 2},
}
"""What obstore does about errors of the server (500, 503, 429) and connections that fail: about 10 seconds of waiting in all."""

CREDENTIALS = {
    "s3": "Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (of a server that is not Amazon's, AWS_ENDPOINT), or "
    "AWS_SKIP_SIGNATURE=true for a public bucket.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or run: gcloud auth application-default login.",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY.",
    "http": "Ask whoever runs the server for the right to read it.",
}
KINDS = {"s3a": "s3", "azure": "az", "adl": "az", "abfs": "az", "abfss": "az", "https": "http"}
"""Schemes that go by another one's rules."""
EXPECTED = "s3://bucket/folder, gs://bucket/folder, az://container/folder, https://host/folder or file:///folder"
NO_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|latest/api/token|metadata\.google|token request|credential|MissingAccount|Account must be specified",
    re.IGNORECASE,
)
"""How errors read where obstore has found no credentials: it then asks the machine that it may be running on."""
WRONG_REGION = re.compile(r"PermanentRedirect|redirect without LOCATION|AuthorizationHeaderMalformed")
DENIED = re.compile(r"status code: 40[13]")
BROKEN_OFF = re.compile(r"HTTP error|body|connection|timed? ?out|incomplete|decod", re.IGNORECASE)

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """What is known of a file before any of it is read."""

    size: int
    version: str
    """Another one when the file is written again."""


class RemoteFiles:
    """The files of a store at an address, which can only be read. Threads may share it."""

    def __init__(self, location: str, cache: Cache | None = None):
        self.location = location.rstrip("/")
        self.cache = Cache() if cache is None else cache
        self.objects = connect(self.location)
        self._kind = kind_of(self.location)
        self._listings: dict[str, dict[str, Found]] = {"": {}}
        """By folder that has a JSON file: its files."""
        self._listed: set[str] = set()
        self._blocks: LRUCache[str, Bytes] = LRUCache(BLOCKS_HELD)
        self._lock = Lock()
        self._fetching = [Lock() for _ in range(64)]
        """A range that two threads want is read by one of them."""
        self.held = Held(HELD_BYTES)
        self.most_mapped = HELD_BYTES

    def __reduce__(self) -> tuple[type[RemoteFiles], tuple[str]]:
        return RemoteFiles, (self.location,)

    # As other files

    def size(self, name: str) -> int:
        """Return the size of a file."""
        if name.endswith(".json"):  # it may have been written again since the others were listed
            return _found(self._asking(name, lambda: obstore.head(self.objects, name))).size
        return self._found(name).size

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        if name.endswith(".json"):
            return self._read_anew(name)
        return self._range(name, 0, self.size(name)).tobytes()

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`, or fewer if the file ends before."""
        if name.endswith(".json"):
            return self._read_anew(name)[begin:end]
        return RemoteRanges(self, name)[begin:end].tobytes()

    def map(self, name: str) -> RemoteRanges:
        """Return what reads slices of a file."""
        return RemoteRanges(self, name)

    # What comes with the cache

    def forget(self, name: str) -> None:
        """Drop what the cache holds of a file, and what is known of its version."""
        beginning = self._key(name)
        with self._lock:
            for key in [key for key in self._blocks if key.startswith(beginning)]:
                del self._blocks[key]
        self.cache.remove_all(beginning)
        self._drop_listing(self._folder(name))

    def look_up(self, names: Sequence[str]) -> None:
        """Find out the sizes of files, several at a time, as somebody is about to ask for them."""
        if names:
            self._try(self.size, names[:1])  # this may list all of them
        self._try(self.size, [name for name in names if name not in self._listings[self._folder(name)]])

    def fetch(self, names: Sequence[str]) -> None:
        """Read whole files into the cache, several at a time, as somebody is about to read them."""
        self._try(self.read, names)

    def _try(self, ask: Callable[[str], object], names: Sequence[str]) -> None:
        def quietly(name: str) -> None:
            with contextlib.suppress(StoreError):  # whoever needs the file says more of what is wrong
                ask(name)

        with ThreadPoolExecutor(FETCHERS) as pool:
            list(pool.map(quietly, names))

    def made_files(self) -> LocalFiles:
        """A folder on this machine for files that are made from the store and can be made again."""
        return self.cache.folder_for(_hashed(self.location))

    # Ranges

    def slice(self, name: str, begin: int, end: int) -> Bytes:
        """Return a range of a file: of a long one, a mapped part of the cache; of a short one, a copy.

        It lies in memory as it would in a mapped file: sums may round otherwise where they begin at another part of a vector register.
        """
        start = begin // ALIGNED * ALIGNED
        if end - start >= BLOCK:
            return self._range(name, start, end)[begin - start :]
        size = self.size(name)
        pieces = []
        for low in range(start // BLOCK * BLOCK, end, BLOCK):
            block = self._block(name, low, min(low + BLOCK, size))
            pieces.append(block[max(start - low, 0) : end - low])
        return _joined(pieces)[begin - start :]

    def _block(self, name: str, low: int, high: int) -> Bytes:
        key = self._key(name, low, high)
        with self._lock:
            block = self._blocks.get(key)
        if block is None:
            block = self._range(name, low, high)
            with self._lock:
                self._blocks[key] = block
        return block

    def _range(self, name: str, begin: int, end: int) -> Bytes:
        """Return a range from the cache, or from where the store is."""
        if begin >= end:
            return np.empty(0, np.uint8)
        key = self._key(name, begin, end)
        with self._fetching[hash(key) % len(self._fetching)]:
            kept = self.cache.get(key)
            if kept is not None and len(kept) == end - begin:
                return kept
            return self.cache.put(key, self.download(name, begin, end))

    def download(self, name: str, begin: int, end: int) -> Bytes:
        """Return a range from where the store is, past the cache."""
        starts = list(range(begin, end, REQUEST))
        ends = [min(start + REQUEST, end) for start in starts]

        def download() -> Bytes:
            # coalesce=0: ranges that follow each other would become one request
            pieces = obstore.get_ranges(self.objects, name, starts=starts, ends=ends, coalesce=0)
            return _joined([np.frombuffer(memoryview(piece), np.uint8) for piece in pieces])

        found = self._asking(name, download)
        if len(found) != end - begin:
            raise StoreDamagedError(
                f"{address(self, name)} is damaged: {len(found):,} bytes came where {end - begin:,} were asked for."
            )
        return found

    def _read_anew(self, name: str) -> bytes:
        """Read a JSON file, and forget what was known about the files beside it."""
        self._drop_listing(name.rpartition("/")[0])
        return self._asking(name, lambda: bytes(obstore.get(self.objects, name).bytes()))

    # What is there

    @property
    def has_lists(self) -> bool:
        """Whether the server can say which files there are: web servers cannot."""
        return self._kind != "http"

    def _folder(self, name: str) -> str:
        """Return the innermost folder around a file that has a JSON file of its own."""
        folder = name
        while folder:
            folder = folder.rpartition("/")[0]
            if folder in self._listings:
                return folder
        return ""

    def _drop_listing(self, folder: str) -> None:
        with self._lock:
            self._listings[folder] = {}
            self._listed.discard(folder)

    def _found(self, name: str) -> Found:
        folder = self._folder(name)
        found = self._listings[folder].get(name)
        if found is None:
            found = self._look_up(folder, name)
        return found

    def _look_up(self, folder: str, name: str) -> Found:
        """Ask for a file; the first time, for all files of its folder, which takes one request for a thousand of them."""
        listing = self._listings[folder]
        if folder not in self._listed and self.has_lists:
            try:
                listing |= self.list_all(folder)
            except StorePermissionError:
                pass  # some may read files and not list them
            else:
                self._listed.add(folder)
        if folder in self._listed and name not in listing:
            raise self._missing(name, None)
        if name not in listing:
            listing[name] = _found(self._asking(name, lambda: obstore.head(self.objects, name)))
        return listing[name]

    def list_all(self, folder: str = "") -> dict[str, Found]:
        """Return all files in a folder of the store, and in those within."""
        prefix = folder or None
        metas = self._asking(folder, lambda: obstore.list(self.objects, prefix, chunk_size=1000).collect())
        return {meta["path"]: _found(meta) for meta in metas}

    def _key(self, name: str, *ends: int) -> str:
        """Return the name of a range in the cache. Without the ends of the range: what all ranges of the file begin with."""
        beginning = _hashed(self.location, name)
        if not ends:
            return beginning
        version = _hashed(self._found(name).version)
        return "-".join([beginning, version, *map(str, ends)])

    # Trying again, and errors

    def _asking(self, name: str, ask: Callable[[], T]) -> T:
        """Ask the server; again, if its answer breaks off. Its errors become store errors."""
        return asking(address(self, name) if name else self.location, ask, partial(self._missing, name))

    def _missing(self, name: str, error: BaseException | None) -> StoreDamagedError:
        missing = StoreDamagedError(
            f"{address(self, name)} is missing, though the manifest names it. Restore it from a copy of the recording."
        )
        missing.__cause__ = error or FileNotFoundError(name)
        return missing


class RemoteRanges(Ranges):
    """The content of a file at an address."""

    def __init__(self, files: RemoteFiles, name: str):
        self._files = files
        self._name = name
        self._size = files.size(name)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> Bytes:
        begin, end, _ = part.indices(self._size)
        return self._files.slice(self._name, begin, max(begin, end))

    def hold(self, array: object, nbytes: int) -> None:
        """Keep an array mapped for a while."""
        self._files.held.add(array, nbytes)


class Held:
    """The last arrays that were read, up to a size together."""

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self._nbytes = 0
        self._arrays: deque[tuple[object, int]] = deque()
        self._lock = Lock()

    def add(self, array: object, nbytes: int) -> None:
        """Hold an array, and let go of those that came first."""
        with self._lock:
            self._arrays.append((array, nbytes))
            self._nbytes += nbytes
            while self._nbytes > self._most_bytes and len(self._arrays) > 1:
                _, released = self._arrays.popleft()
                self._nbytes -= released


def connect(location: str) -> ObjectStore:
    """Return obstore's store for an address. Credentials come from the environment; nothing is asked for yet."""
    kind = kind_of(location)
    if kind not in CREDENTIALS or not urlsplit(location).netloc:
        raise StoreError(f"{location} is not an address of a recording; expected {EXPECTED}.")
    factory: Any = from_url  # its overloads differ in settings that are not given here
    try:
        connected: ObjectStore = factory(location, client_options=CLIENT, retry_config=RETRIES)
    except (BaseError, ValueError) as error:
        raise explained(location, error) from error
    return connected


def kind_of(location: str) -> str:
    """Return by which rules an address goes: s3, gs, az or http."""
    scheme = urlsplit(location).scheme.lower()
    return KINDS.get(scheme, scheme)


def asking(
    where: str, ask: Callable[[], T], missing: Callable[[BaseException], StoreError], *, what: str = "read"
) -> T:
    """Ask a server; again, if its answer breaks off. Its errors become store errors.

    missing: the error for what is not there. what: what is done to `where`, "read" or "written".
    """
    wait = FIRST_WAIT
    for is_last in [False] * (TRIES - 1) + [True]:
        try:
            return ask()
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise explained(where, error, what) from None
            raise missing(error) from error
        except (BaseError, OSError) as error:
            if is_last or not _broke_off(error):
                raise explained(where, error, what) from error
        time.sleep(wait * random.uniform(0.5, 1.5))
        wait *= 2
    raise AssertionError


def _broke_off(error: BaseException) -> bool:
    """Whether an answer began and did not end. Whatever happens before, obstore has tried again."""
    text = str(error)
    is_before = "max_retries" in text or "status code" in text
    return isinstance(error, (GenericError, OSError)) and not is_before and BROKEN_OFF.search(text) is not None


def explained(where: str, error: BaseException, what: str = "read") -> StoreError:
    """Return the store error for one of obstore's: what is wrong, and how to mend it."""
    text = str(error)
    credentials = CREDENTIALS.get(kind_of(where), "")
    reason = _reason(text)
    failed = f"{where} cannot be {what}"
    if "NoSuchBucket" in text:
        bucket = urlsplit(where).netloc
        return StoreMissingError(f"{failed}: there is no bucket {bucket!r}. Check the address and the endpoint.")
    if WRONG_REGION.search(text):
        return StoreError(f"{failed}: the bucket is in another region ({reason}). Set AWS_REGION.")
    if NO_CREDENTIALS.search(text):
        return StorePermissionError(f"{failed}: no credentials were found. {credentials}")
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or DENIED.search(text):
        return StorePermissionError(f"{failed}: access is denied ({reason}). {credentials}")
    if "error sending request" in text:
        return StoreError(
            f"{where} cannot be reached ({reason}). Check the network, the host's name and, if it is set, the endpoint."
        )
    if "Range request not supported" in text:
        return StoreError(
            f"{failed}: its server sends whole files only, and a recording is read by ranges. Use a server that answers range requests (nginx, "
            f"Caddy, Apache; `python -m http.server` does not), or copy the folder to this machine by other means."
        )
    cure = "Try again; what has been read stays in the cache." if what == "read" else "Try again: it goes on from here."
    return StoreError(f"{failed}: {reason}. {cure}")


def _reason(text: str) -> str:
    """Return the gist of obstore's message: what an XML answer says, or the last part of the first line."""
    code = re.search(r"<Code>(.*?)</Code>", text)
    message = re.search(r"<Message>(.*?)</Message>", text)
    if code:
        return f"{code[1]}: {message[1].rstrip('.')}" if message else code[1]
    line = text.partition("\n")[0].strip()
    status = re.search(r"status code: (\d+ [A-Za-z ]+)", line)
    if status:
        return status[1].strip()
    return line.rpartition(" - ")[2][:200].rstrip(". :")


def _joined(pieces: Sequence[Bytes]) -> Bytes:
    """Return one array, which begins at a multiple of ALIGNED in memory."""
    size = sum(map(len, pieces))
    memory = np.empty(size + ALIGNED, np.uint8)
    skip = -memory.ctypes.data % ALIGNED
    joined = memory[skip : skip + size]
    begin = 0
    for piece in pieces:
        joined[begin : begin + len(piece)] = piece
        begin += len(piece)
    return joined


def _found(meta: Any) -> Found:
    version = meta["e_tag"] or str(meta["last_modified"])
    return Found(meta["size"], f"{version} {meta['size']}")


def _hashed(*texts: str) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=10).hexdigest()
