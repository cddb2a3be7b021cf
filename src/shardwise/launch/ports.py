"""TCP ports for the ranks to meet at."""

from __future__ import annotations

import socket

SEVERAL_NODES_DEFAULT = 29500


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a listener could be opened on `port` of this machine, all addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the ranks' own listener does: a port in TIME_WAIT is free, one with a listener is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
