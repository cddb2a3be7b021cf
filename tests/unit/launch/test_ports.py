"""Ports for the rendezvous."""

from __future__ import annotations

import socket

from shardwise.launch.ports import free_port, is_free


def test_a_listener_makes_a_port_busy() -> None:
    port = free_port()
    assert is_free(port)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert not is_free(port)
    assert is_free(port)
