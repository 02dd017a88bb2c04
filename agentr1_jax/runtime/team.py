"""Processes that do one thing together: the first of them leads, and tells the others what to do."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing import connection as sockets
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import jax

from agentr1_jax.errors import PassingError
from agentr1_jax.runtime import processes

T = TypeVar("T")

LOST_SECONDS = 3
"""To wait for the end of a lost process's connection."""


class Team:
    """This process's connections to those it works with; it is alone unless it is told of some.

    Args:
      size: processes, this one among them.
      leads: whether this is the one that leads.
      links: of the leader to each of the others, in order of process index; of those to the leader alone.
    """

    def __init__(self, size: int = 1, leads: bool = True, links: Mapping[int, Connection] | None = None) -> None:
        self.size = size
        self.leads = leads
        self._links = dict(links or {})

    @property
    def teller(self) -> Callable[[Any], None] | None:
        """`tell`, where there is anybody whom this process tells anything."""
        return self.tell if self.leads and self._links else None

    def tell(self, message: Any) -> None:
        """Hands anything but None to all others; by the leader, within `leading`."""
        payload = pickle.dumps(message)
        for link in self._links.values():
            link.send_bytes(payload)

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """What the others follow: their messages end where this does, and where it fails they fail, too.

        A program over all of them may wait for a lost one for ever: where that does not fail soon, this process ends.

        Raises:
          PassingError: a process was lost meanwhile; names it.
        """
        over = threading.Event()
        if self._links:
            threading.Thread(target=self._watch, args=(over,), name="watch", daemon=True).start()
        try:
            with self._together():
                yield
                self.tell(None)
        finally:
            over.set()

    @contextlib.contextmanager
    def following(self) -> Iterator[Iterator[Any]]:
        """What the leader tells this process while it is `leading`, once.

        Raises:
          PassingError: the leader was lost; names it.
        """
        (link,) = self._links.values()
        with self._together():
            yield iter(link.recv, None)

    def deal(self, items: Sequence[T]) -> list[T]:
        """This process's share of what the leader has, every n-th; what others pass does not matter. Called by all.

        Raises:
          PassingError: a process was lost; names it.
        """
        with self._together():
            if not self.leads:
                (link,) = self._links.values()
                return link.recv()
            for place, link in enumerate(self._links.values(), start=1):
                link.send(list(items[place :: self.size]))
            return list(items[:: self.size])

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Where this fails the others hear of it at once; and where that is since one was lost, names that one."""
        try:
            yield
        except BaseException as error:
            lost = self._lost() if isinstance(error, jax.errors.JaxRuntimeError | EOFError | OSError) else []
            for link in self._links.values():
                link.close()
            if not lost:
                raise
            raise PassingError(self._obituary(lost[0])) from error

    def _watch(self, over: threading.Event) -> None:
        lost: list[int] = []
        with contextlib.suppress(OSError):  # Closed, since the main thread knows already.
            while not lost and not over.is_set():
                sockets.wait(list(self._links.values()), 1)
                lost = [process for process, link in self._links.items() if _ended(link)]
        if lost and not over.wait(LOST_SECONDS):
            sys.stderr.write(f"error: {self._obituary(lost[0])}\n")
            sys.stderr.flush()
            os._exit(PassingError.status)

    def _obituary(self, process: int) -> str:
        return (
            f"process {process} is lost, which {'follows' if self.leads else 'leads'} in the engine of process "
            f"{processes.process_index()} (mesh.rollout_processes); its own log says why"
        )

    def _lost(self) -> list[int]:
        """The processes whose connections end by now or very soon: a program may fail before its connection does."""
        lost: list[int] = []
        deadline = time.monotonic() + LOST_SECONDS
        while self._links and not lost and (left := deadline - time.monotonic()) > 0:
            sockets.wait(list(self._links.values()), left)
            lost = [process for process, link in self._links.items() if _ended(link)]
        return lost


def _ended(link: Connection) -> bool:
    """Whether the other end is gone; forgets what came from there before."""
    try:
        while link.poll():
            link.recv_bytes()
    except (EOFError, ConnectionError):
        return True
    return False


def join(size: int) -> Team:
    """Connects this process with those of its team: `size` consecutive ones. Collective, of all processes of the run.

    Messages are pickled: whoever takes part proves to know a key that the leader made and gave out by a collective.

    Raises:
      PassingError: the leader cannot be reached.
    """
    if size == 1:
        return Team()
    process = processes.process_index()
    leader = process - process % size
    if process != leader:
        host, port, key = processes.all_gather_json(None)[leader]
        try:
            link = sockets.Client((host, port), authkey=bytes.fromhex(key))
        except OSError as error:
            raise PassingError(
                f"process {process} cannot reach process {leader}, which leads its engine, at {host}, port {port} "
                f"({error}): the ports of processes that share an engine (mesh.rollout_processes) must be open to each "
                "other"
            ) from error
        link.send(process)
        return Team(size, leads=False, links={leader: _without_delay(link)})
    host, key = own_host(), secrets.token_bytes(32)
    with sockets.Listener((host if _is_loopback(host) else "", 0), "AF_INET", size, authkey=key) as listener:
        processes.all_gather_json([host, listener.address[1], key.hex()])
        links: dict[int, Connection] = {}
        while len(links) < size - 1:
            with contextlib.suppress(AuthenticationError, EOFError, ConnectionError):  # A stranger.
                link = listener.accept()
                links[link.recv()] = _without_delay(link)
    return Team(size, links=dict(sorted(links.items())))


def own_host() -> str:
    """Where the other processes reach this one: the address from which it reaches the coordinator.

    Process 0 is where the others have found the coordinator.
    """
    host, _, port = os.environ["AGENTR1_COORDINATOR"].rpartition(":")
    if processes.process_index() == 0:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((host, int(port)))  # Sends nothing.
        return route.getsockname()[0]


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def _without_delay(link: Connection) -> Connection:
    """The same, which sends small messages at once instead of waiting for the answer to the one before."""
    with socket.socket(fileno=os.dup(link.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link
