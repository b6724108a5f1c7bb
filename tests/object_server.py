"""A server on this machine that speaks as much of S3 as a store needs, and fails when it is told to.

It keeps objects in memory, or passes requests on to another server (moto's, where that is installed).

    with ObjectServer() as server:
        server.fail(Fault("cut", match="slots.safetensors"))
        dualform.open("s3://bucket/run")
"""

import hashlib
import http.client
import re
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

PAGE = 10
"""A list has at most this many entries, so that tests ask for several pages."""


@dataclass
class Fault:
    """What goes wrong with the next requests whose method and path match."""

    kind: str
    """"500", "403", "404", "cut" (half of the answer, then the connection closes), "slow", or "change" (a byte is another one)."""
    match: str = ""
    """A regular expression, searched in "GET /bucket/run/chunk-000000/rows.parquet"."""
    times: int = 1
    skip: int = 0
    """How many matching requests are answered before."""


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    nbytes: int


@dataclass
class Answer:
    status: int
    body: bytes = b""
    headers: dict = field(default_factory=dict)


class ObjectServer:
    def __init__(self, upstream=None):
        """upstream: the port of another S3 server on this machine; None: objects are kept here."""
        self.upstream = upstream
        self.objects = {}
        self.requests = []
        self.faults = []
        self._uploads = {}
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"server_of_objects": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    def fail(self, *faults):
        self.faults += faults

    def fault_for(self, text):
        with self._lock:
            for fault in self.faults:
                if not fault.times or not re.search(fault.match, text):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault.kind
        return None

    def answer(self, method, target, headers, body):
        if self.upstream is not None:
            return self._pass_on(method, target, headers, body)
        parts = urlsplit(target)
        query = parse_qs(parts.query, keep_blank_values=True)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        if bucket != "bucket":
            return _error(404, "NoSuchBucket", "The specified bucket does not exist")
        with self._lock:
            if not key:
                return self._delete_all(body) if "delete" in query else self._list(query)
            if "uploads" in query or "uploadId" in query:
                return self._upload(method, key, query, body)
            if method == "PUT":
                self.objects[key] = body
                return Answer(200, headers={"ETag": _etag(body)})
            if method == "DELETE":
                self.objects.pop(key, None)
                return Answer(204)
            return self._get(key, headers)

    def _get(self, key, headers):
        if key not in self.objects:
            return _error(404, "NoSuchKey", "The specified key does not exist.")
        content = self.objects[key]
        found = {"ETag": _etag(content), "Last-Modified": formatdate(0, usegmt=True)}
        given = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", ""))
        if given is None:
            return Answer(200, content, found)
        low = int(given[1])
        high = min(int(given[2] or len(content)), len(content) - 1)
        if low >= len(content):
            return _error(416, "InvalidRange", "The requested range is not satisfiable")
        found["Content-Range"] = f"bytes {low}-{high}/{len(content)}"
        return Answer(206, content[low : high + 1], found)

    def _list(self, query):
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", [""])[0]
        names = sorted(name for name in self.objects if name.startswith(prefix) and name > after)
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00Z</LastModified>"
            f"<ETag>{escape(_etag(self.objects[name]))}</ETag><Size>{len(self.objects[name])}</Size></Contents>"
            for name in names[:PAGE]
        )
        if len(names) > PAGE:
            entries += f"<NextContinuationToken>{escape(names[PAGE - 1])}</NextContinuationToken>"
        return Answer(200, f"<ListBucketResult>{entries}</ListBucketResult>".encode())

    def _delete_all(self, body):
        names = re.findall(r"<Key>(.*?)</Key>", body.decode())
        for name in names:
            self.objects.pop(unescape(name), None)
        deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        return Answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def _upload(self, method, key, query, body):
        """A large object comes in parts."""
        if "uploads" in query:
            number = str(len(self._uploads))
            self._uploads[number] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            return Answer(200, text.encode())
        parts = self._uploads[query["uploadId"][0]]
        if method == "PUT":
            parts[int(query["partNumber"][0])] = body
            return Answer(200, headers={"ETag": _etag(body)})
        if method == "DELETE":
            return Answer(204)
        self.objects[key] = b"".join(parts[number] for number in sorted(parts))
        etag = escape(_etag(self.objects[key]))
        return Answer(
            200, f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>".encode()
        )

    def _pass_on(self, method, target, headers, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=30)
        try:
            connection.request(method, target, body, {name: headers[name] for name in headers if name != "Connection"})
            found = connection.getresponse()
            kept = {name: value for name, value in found.getheaders() if name not in HOP_BY_HOP}
            return Answer(found.status, found.read(), kept)
        finally:
            connection.close()


HOP_BY_HOP = ("Connection", "Content-Length", "Date", "Server", "Transfer-Encoding")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_objects = None
    disable_nagle_algorithm = True

    def log_message(self, *arguments):
        pass

    def answer(self):
        server = self.server_of_objects
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = server.fault_for(f"{self.command} {unquote(self.path)}")
        if fault == "slow":
            time.sleep(0.3)
        found = server.answer(self.command, self.path, self.headers, body)
        if fault is not None and fault.isdecimal():
            found = _error(int(fault), "Injected", "a fault of the test")
        if fault == "change" and found.body:
            middle = len(found.body) // 2
            found.body = found.body[:middle] + bytes([found.body[middle] ^ 1]) + found.body[middle + 1 :]
        with server._lock:
            server.requests.append(
                Request(self.command, unquote(self.path), self.headers.get("Range"), len(found.body))
            )
        self.send_response(found.status)
        for name, value in found.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(found.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(found.body[: len(found.body) // 2] if fault == "cut" else found.body)
        if fault == "cut":
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815


def _error(status, code, message):
    return Answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())


def _etag(content):
    return f'"{hashlib.md5(content).hexdigest()}"'
