"""The server: its address, its token, and clients that are slow."""

import socket
import time
from http.client import HTTPConnection

import httpx
import pytest
from clients import asked, bearer

from dualform.errors import QuestionError
from dualform.explorer import server as served_module
from dualform.explorer.connections import TimedProtocol
from dualform.explorer.server import Server, is_loopback

HALF = b"GET /api/log HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
PATIENCE = 1.0


@pytest.fixture(scope="module")
def quick(session):
    """A server that does not wait long."""
    with Server(session, patience=PATIENCE) as server:
        yield server


def connected(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def is_closed(connection):
    """Wait for the server's end of the connection."""
    try:
        return connection.recv(1 << 16) == b""
    except ConnectionError:
        return True


def test_only_this_machine_unless_asked():
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_every_server_has_a_token(session, host):
    with Server(session, host=host) as server, Server(session, host=host) as other:
        assert len(server.token) >= 32
        assert server.token != other.token
        assert server.url == f"{server.address}?token={server.token}"
        address = f"http://127.0.0.1:{server.port}/api/log"
        assert httpx.get(address).status_code == 401
        assert httpx.get(address, headers=bearer(other)).status_code == 401
        assert httpx.get(address, headers=bearer(server)).status_code == 200


def test_the_address_opens_the_page_and_is_remembered(quick):
    with httpx.Client(follow_redirects=True) as browser:
        page = browser.get(quick.url)
        assert page.status_code == 200
        assert page.url == quick.address
        assert browser.get(f"{quick.address}api/log").status_code == 200


def test_the_token_is_not_in_its_repr(quick):
    assert quick.token not in repr(quick)


def test_a_port_that_is_taken(quick, session):
    with pytest.raises(QuestionError, match="cannot listen"):
        Server(session, port=quick.port)


def test_loopback_is_announced_without_a_warning(quick, capsys):
    quick.announce(ends=True)
    printed = capsys.readouterr()
    assert printed.out == f"dualform explorer: {quick.url}   (Ctrl-C ends it)\n"
    assert printed.err == ""


def test_every_address_is_announced_as_others_reach_it_with_a_warning(session, capsys, monkeypatch):
    monkeypatch.setattr(served_module, "_reachable", lambda host: "192.0.2.7")
    with Server(session, host="0.0.0.0") as server:
        server.announce(ends=False)
        printed = capsys.readouterr()
        assert printed.out == f"dualform explorer: http://192.0.2.7:{server.port}/?token={server.token}\n"
        assert "not encrypted" in printed.err
        assert f"ssh -L {server.port}:127.0.0.1:{server.port}" in printed.err
        headers = bearer(server) | {"host": f"192.0.2.7:{server.port}"}  # as a browser that opens this address
        assert httpx.get(f"http://127.0.0.1:{server.port}/api/log", headers=headers).status_code == 200


def test_without_a_network_the_machines_name_is_announced(monkeypatch):
    def unreachable(*_):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(served_module.socket.socket, "connect", unreachable)
    assert served_module._reachable("0.0.0.0") == socket.gethostname()
    assert served_module._reachable("::") == socket.gethostname()


def test_answers_are_sent_without_delay(quick, monkeypatch):
    """TCP_NODELAY: otherwise head and body of an answer, sent one after the other, wait for the client's system."""
    found, made = [], TimedProtocol.connection_made

    def connection_made(self, transport):
        found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(TimedProtocol, "connection_made", connection_made)
    asked(quick, "api/log")
    assert found
    assert all(found)


# Slow clients


def test_many_half_requests_keep_nobody_out(session):
    """With the default patience: the others do not have to wait until the half requests are given up."""
    with Server(session) as server:
        open_sockets = [connected(server) for _ in range(300)]
        try:
            for connection in open_sockets:
                connection.sendall(HALF)
            began = time.monotonic()
            for _ in range(5):
                assert asked(server, "api/log").status_code == 200
            assert time.monotonic() - began < 5
        finally:
            for connection in open_sockets:
                connection.close()


def test_a_request_must_arrive_in_time(quick):
    began = time.monotonic()
    connections = [connected(quick) for _ in range(3)]
    connections[1].sendall(HALF)
    connections[2].sendall(b"POST /api/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n"
                           b"Authorization: Bearer " + quick.token.encode() + b"\r\n\r\n{")  # fmt: skip
    for connection in connections:
        with connection:
            assert is_closed(connection)
    assert PATIENCE / 2 < time.monotonic() - began < PATIENCE + 5


def test_trickling_bytes_do_not_prolong_it(quick):
    began = time.monotonic()
    with connected(quick) as connection:
        connection.sendall(HALF)
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 20:
                connection.sendall(b"x")
                time.sleep(0.05)
    assert time.monotonic() - began < PATIENCE + 5


def test_a_second_request_must_arrive_in_time_too(quick):
    connection = HTTPConnection("127.0.0.1", quick.port, timeout=10)
    connection.request("GET", "/api/log", headers=bearer(quick))
    first = connection.getresponse()
    assert first.status == 200
    first.read()
    began = time.monotonic()
    connection.sock.sendall(HALF)
    assert is_closed(connection.sock)
    assert time.monotonic() - began < PATIENCE + 5
    connection.close()


def test_who_does_not_read_is_given_up(quick):
    """The largest file of the page does not fit into the buffers of a connection."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", quick.port))
        connection.sendall(b"GET /page/plotly.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        time.sleep(PATIENCE + 1)
        received = 0
        with pytest.raises(ConnectionError):
            while piece := connection.recv(1 << 20):
                received += len(piece)
            raise ConnectionResetError  # closed in the middle
        assert received < 3_000_000


def test_a_slow_answer_is_waited_for(quick, session, monkeypatch):
    """A deadline for requests is none for answers."""

    def slowly():
        time.sleep(2 * PATIENCE)
        return log()

    log = session.log
    monkeypatch.setattr(session, "log", slowly)
    assert asked(quick, "api/log").status_code == 200
