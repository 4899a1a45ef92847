"""Connecting to a sidecar's directory, which nobody else may have written to."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct

from lookaside import wire

SOCKET_NAME = "session.sock"
"""The session socket's name in the sidecar's directory."""

HOSTS_SOCKET_NAME = "hosts.sock"
"""The name of the socket for sessions with sidecars of other hosts."""

_SUN_PATH_BYTES = 107


class EndpointError(RuntimeError):
    """The endpoint's directory cannot be trusted or used. The message gives the reason."""


class EndpointAbsent(EndpointError):
    """Nothing listens at the endpoint."""


def open_endpoint(directory: str, name: str = SOCKET_NAME) -> socket.socket:
    """Connect to a socket of a sidecar's directory, without blocking.

    The directory and the process behind the socket must belong to this user, and nobody else may be
    able to put a socket there. Raises EndpointAbsent if nothing listens, EndpointError for a
    directory that cannot be trusted.
    """
    path = os.path.join(directory, name)
    if len(os.fsencode(path)) > _SUN_PATH_BYTES:
        raise EndpointError(
            f"{path!r} has {len(os.fsencode(path))} bytes; a Unix socket's path has room for "
            f"{_SUN_PATH_BYTES}"
        )
    check_directory(directory)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        # A packet may be larger than the default send buffer.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wire.SOCKET_BUFFER_BYTES)
        try:
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if (
                name == HOSTS_SOCKET_NAME
                and isinstance(error, FileNotFoundError)
                and os.path.exists(os.path.join(directory, SOCKET_NAME))
            ):
                raise EndpointError(
                    f"the sidecar in {directory} carries no sessions to other hosts: set "
                    "hosts.token_file, or hosts.listen, as on those hosts"
                ) from error
            raise EndpointAbsent(f"{path}: {error.strerror}") from error
        except BlockingIOError as error:
            raise EndpointError(f"{path}: too many clients wait to be accepted") from error
        except OSError as error:
            raise EndpointError(f"{path}: {error.strerror}") from error
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", peer)
        if uid not in (os.geteuid(), 0):
            raise EndpointError(f"{path} is served by user {uid}, not by us ({os.geteuid()})")
        return sock
    except BaseException:
        sock.close()
        raise


def check_directory(directory: str) -> None:
    """Refuse a directory in which others could have put a socket.

    Raises EndpointAbsent if it does not exist, EndpointError otherwise.
    """
    try:
        status = os.lstat(directory)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise EndpointAbsent(f"{directory}: {error.strerror}") from error
        raise EndpointError(f"{directory}: {error.strerror}") from error
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        raise EndpointError(f"{directory} is not a directory (symbolic links are refused)")
    if status.st_uid != os.geteuid():
        raise EndpointError(
            f"{directory} belongs to user {status.st_uid}, not to us ({os.geteuid()})"
        )
    if status.st_mode & 0o077:
        raise EndpointError(
            f"{directory} has mode {stat.S_IMODE(status.st_mode):04o}; others must have no access"
        )
