"""`python -m tests.conformance.loopback_only COMMAND...`: run it where there is no other network.

Mooncake's engine listens on all interfaces, without asking who calls, and cannot be told not to:
its tests have a network namespace of their own (`unshare --map-root-user --net` before this).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

#: Linux: SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP.
_GET, _SET, _UP = 0x8913, 0x8914, 0x1


def raise_loopback() -> None:
    """A new namespace has its loopback down. Raises OSError without the right to raise it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        name, flags = struct.unpack("16sH14x", fcntl.ioctl(sock, _GET, request))
        fcntl.ioctl(sock, _SET, struct.pack("16sH14x", name, flags | _UP))


def main() -> None:
    others = {name for _, name in socket.if_nameindex()} - {"lo"}
    if others:
        sys.exit(f"there are other interfaces here: {sorted(others)}; call it under unshare --net")
    raise_loopback()
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
