"""Addresses at which the nodes of a run meet."""

from experiments.config.errors import UserError

LAST_PORT = 65_535


def host_and_port(endpoint: str, *, key: str, nnodes: int) -> tuple[str, int]:
    """Return the host and the port of ``HOST:PORT``; port 0 takes a free one, for a single node.

    Args:
        key: the name of the setting, for the message.

    Raises:
        UserError: it is not HOST:PORT, or the port is out of its range.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or host != host.strip() or any(letter in host for letter in " /\t\n"):
        raise UserError(f"{key} must be HOST:PORT, one of the nodes and a free port of it, got {endpoint!r}")
    if not (port.isdecimal() and port.isascii()) or len(port) > 9 or int(port) > LAST_PORT:
        raise UserError(f"{key} must have a port from 1 to {LAST_PORT}, got {endpoint!r}")
    if nnodes > 1 and int(port) == 0:
        raise UserError(f"{key} must name a port when nnodes is {nnodes}, got {endpoint!r}")
    return host, int(port)
