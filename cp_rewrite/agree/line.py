"""Ask the kernel of another machine if a process there lives: what holds Python's lock there holds nothing up.

    rank 1's door    listens; says who it is, once, to each that comes
    rank 0's line    connects, hears that it is rank 1's, and is kept open
                     the process ends, however it ends     its kernel closes the line
                     its machine is gone                   no answer to what the kernel asks every `ASK_S` seconds
                     it computes, compiles, is stopped     the line stands

A line that never stood says nothing: ports between machines may be closed, and a name may lead elsewhere.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

ASK_S, ASKS = 5, 5
_LOOKS = 30
"""At a line that says nothing, before another address is tried."""


class Door:
    """Listens on a port of all addresses; `me`: what it says to each that comes, and nothing else."""

    def __init__(self, me: str) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=dual)
        self._socket.setblocking(False)
        self._me, self._lines = f"{me}\n".encode(), list[socket.socket]()
        self.places = f"{','.join(_own_hosts())} {self._socket.getsockname()[1]}"
        """Its place for others: addresses of this machine, and the port."""
        os.register_at_fork(after_in_child=self.close)  # a worker that outlives its parent must not hold it open

    def answer(self) -> None:
        """Say who this is to those who came meanwhile."""
        with suppress(OSError):
            while True:
                line = self._socket.accept()[0]
                self._lines.append(line)
                line.setblocking(False)
                line.send(self._me)

    def close(self) -> None:
        """Close the port and all lines in this process; those of its parent stay open."""
        for opened in (self._socket, *self._lines):
            opened.close()


class Line:
    """A connection to the door of another process, which says there that it is `other`. No method waits."""

    def __init__(self, places: str, other: str) -> None:
        hosts, _, port = places.rpartition(" ")
        self._places = [(host, int(port)) for host in hosts.split(",") if host]
        self._expected, self._heard = f"{other}\n".encode(), b""
        self._socket: socket.socket | None = None
        self._looks, self._stood = 0, False
        self._lock = threading.Lock()

    def stands(self) -> bool | None:
        """False: it stood, and the process at its end is gone. None: nothing is known yet; asked again, it may be."""
        with self._lock:
            if self._socket is None and not self._stood and self._places:
                self._connect()
            if self._socket is not None and not self._hears(self._socket):
                self._socket.close()
                self._socket, self._heard = None, b""
                self._places.append(self._places.pop(0))
            return self._socket is not None if self._stood else None

    def _hears(self, line: socket.socket) -> bool:
        """False if the line has ended, or does not lead to the process that is expected."""
        self._looks += 1
        try:
            while said := line.recv(256):
                self._heard += said
                self._stood = self._heard == self._expected
        except BlockingIOError:
            return self._stood or (self._expected.startswith(self._heard) and self._looks < _LOOKS)
        except OSError:
            pass
        return False

    def _connect(self) -> None:
        host, port = self._places[0]
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", ASK_S), ("TCP_KEEPINTVL", ASK_S), ("TCP_KEEPCNT", ASKS)):
            if hasattr(socket, name):  # not on every system
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket.connect_ex((host, port))
        self._looks = 0


def _own_hosts() -> list[str]:
    """Addresses by which other machines may reach this one, likeliest first."""
    found: list[str] = []
    for host in (os.environ.get("MASTER_ADDR", ""), "192.0.2.1"):  # the second is nobody's: by the usual way out
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.connect((host, 9))  # sends nothing
            found.append(asked.getsockname()[0])
    with suppress(OSError):
        found += [str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None)]
    return list(dict.fromkeys(host for host in found if "%" not in host))
