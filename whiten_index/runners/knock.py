"""Whether Ray answers at an address, asked before Ray itself does, which tries for minutes."""

from __future__ import annotations

import os
import socket

_SECONDS, _LAST_PORT = 10.0, 65_535
# What a client of HTTP/2, and so of gRPC, says first (RFC 9113, 3.4): its preface, no settings.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEADER, _TYPE, _SETTINGS = 9, 3, 4


def knock(address: str) -> None:
    """Greet whoever listens at ``host:port``, and leave; other addresses are left to Ray.

    Raises:
        OSError: nobody listens there, or not one who speaks gRPC, as a head of Ray does.
    """
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return
    if int(port) > _LAST_PORT:
        raise OSError(f"a port is at most {_LAST_PORT}")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS) as connection:
        # One with TLS takes no greeting in plain text.
        if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
            connection.sendall(_PREFACE)
            _require_settings(connection)


def _require_settings(connection: socket.socket) -> None:
    """Take the frame that an answer must begin with."""
    said = b""
    try:
        while len(said) < _FRAME_HEADER and (more := connection.recv(_FRAME_HEADER - len(said))):
            said += more
    except TimeoutError as error:
        raise OSError(f"what listens there said nothing for {_SECONDS:.0f} seconds") from error
    except ConnectionResetError:
        # By one who did not like the greeting.
        said = b""
    if len(said) < _FRAME_HEADER or said[_TYPE] != _SETTINGS:
        raise OSError("what listens there is not Ray, or wants TLS: set RAY_USE_TLS as it has it")
