"""Conditions from somebody who means harm, and ways to see whether they had any effect outside of the process."""

import contextlib
import ctypes
import os
import socket
import threading

CONDITIONS = [
    "array_length(generate_series(1,300000000)) > 1",
    "lpad(task, 100000, 'x') = 'x'",
    "length(repeat('x', 2000000000)) > 1",
    "(SELECT nosuch FROM read_csv('{file}')) = 1",
    "step IN (SELECT step FROM read_csv('{file}'))",
    "EXISTS (SELECT 1 FROM read_ndjson('{file}'))",
    "step = (SELECT count(*) FROM read_parquet('{file}'))",
    "step = (SELECT count(*) FROM read_ipc('{file}'))",
    "step = (SELECT count(*) FROM '{file}')",
    "(SELECT nosuch FROM read_csv('{url}')) = 1",
    "step IN (SELECT * FROM read_parquet('{url}'))",
    "step = 1 UNION SELECT * FROM read_csv('{file}')",
    "step = 1; SELECT * FROM read_csv('{file}')",
    "step = 1 -- ) OR (1 = 1",
    "step = 1 /* read_csv('{file}') */",
    "read_csv('{file}')",
    "read_csv = '{file}'",
    "COLUMNS('.*') = 1",
    "* = 1",
    '"*" = 1',
    '"^.*$" = 1',
    "rows.step = 1",
    "step::text LIKE '%'",
    "CAST(step AS VARCHAR) = '1'",
    "CASE WHEN step = 1 THEN true ELSE false END",
    "sum(step) OVER () > 1",
    "step = ?",
    "step = :name",
    "step = @@version",
    "{{ 7 * 7 }} = 49",
    "task REGEXP '(a+)+$'",
    "task LIKE 'x' ESCAPE '\\'",
    "(" * 700 + "step" + ")" * 700,
    "NOT " * 350 + "true",
    "- " * 700 + "1 = step",
    "[" * 1000,
    "{" * 1000,
    "CASE " * 250,
    "step" + " + step" * 200 + " = 1",
    "step = " + "9" * 1400,
    "step = 1e99999",
    "task = '\ud800'",
    "task = 'x",
    'task = "x',
    "",
    " \t\n",
    "\x00",
    "step = \x00",
]
"""{file} and {url}: what must not be read."""


def conditions(file, url="http://127.0.0.1:9/"):
    return [text.replace("{file}", str(file)).replace("{url}", url) for text in CONDITIONS]


@contextlib.contextmanager
def opened(file):
    """Whether anybody has opened a file meanwhile; gives a function that says so. Needs Linux's inotify."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    assert descriptor >= 0
    IN_OPEN = 0x20
    assert libc.inotify_add_watch(descriptor, os.fsencode(file), IN_OPEN) >= 0

    def was_opened():
        try:
            return bool(os.read(descriptor, 4096))
        except BlockingIOError:
            return False

    try:
        yield was_opened
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def listening():
    """A server on loopback that must not be asked; gives its address and the requests it has seen."""
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        ended = threading.Event()

        def serve():
            while not ended.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    seen.append(connection.recv(4096))
                    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/secret.csv", seen
        finally:
            ended.set()
            thread.join()
