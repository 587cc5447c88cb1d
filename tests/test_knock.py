"""Whoever is no head of Ray is told apart before Ray tries for minutes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from whiten_index.runners.knock import knock

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
Answer = Callable[[socket.socket], None]


@pytest.fixture
def listen() -> Iterator[Callable[[Answer], str]]:
    """Start a server on loopback that answers once; return its address."""
    servers = list[socket.socket]()

    def start(answer: Answer) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


def test_one_who_speaks_grpc_is_left_to_ray(listen: Callable[[Answer], str]) -> None:
    heard = list[bytes]()

    def answer(connection: socket.socket) -> None:
        heard.append(connection.recv(100))
        # In pieces, as a network may deliver it.
        connection.sendall(SETTINGS[:5])
        connection.sendall(SETTINGS[5:])

    knock(listen(answer))
    assert heard[0].startswith(b"PRI * HTTP/2.0\r\n")


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"no", b""]
)
def test_one_who_speaks_otherwise_is_not_ray(listen: Callable[[Answer], str], said: bytes) -> None:
    with pytest.raises(OSError, match="what listens there is not Ray, or wants TLS"):
        knock(listen(lambda connection: connection.sendall(said)))


def test_one_who_says_nothing_is_told_in_time(
    listen: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whiten_index.runners.knock._SECONDS", 0.2)
    done = threading.Event()
    address = listen(lambda connection: done.wait(30) and None)
    with pytest.raises(OSError, match="said nothing for 0 seconds"):
        knock(address)
    done.set()


def test_one_with_tls_is_not_greeted_in_plain_text(
    listen: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    heard = list[bytes]()
    came = threading.Event()

    def answer(connection: socket.socket) -> None:
        heard.append(connection.recv(100))
        came.set()

    knock(listen(answer))
    assert came.wait(10)
    assert heard == [b""]


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        knock(f"127.0.0.1:{port}")
    with pytest.raises(OSError, match="at most 65535"):
        knock("127.0.0.1:70000")


@pytest.mark.parametrize("address", ["auto", "local", "", "ray://head:10001", "head"])
def test_other_addresses_are_left_to_ray(address: str) -> None:
    knock(address)
