"""A Ray cluster of several machines, all of them this one: a raylet each, on loopback only."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# Of each machine one; for 127.0.0.1 Ray takes the address that other machines see.
HEAD = "127.0.0.2"
RAY = str(Path(sys.executable).with_name("ray"))
# Of all processes of the clusters, this one among them; Ray reads it once. Without it, Ray may
# write one into the home folder.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
_SECONDS_TO_START = 60.0


def free_port() -> int:
    """Return a port of loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind((HEAD, 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """Return a process and all that it started, by what /proc tells."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += parents.get(found[-1], [])
    return found


class Node:
    """A machine of the cluster."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [RAY, "start", "--block", "--disable-usage-stats", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            )

    def await_start(self) -> None:
        """Wait until it is up.

        Raises:
            AssertionError: it ended, or takes too long; with what it told.
        """
        end = time.monotonic() + _SECONDS_TO_START
        while "Ray runtime started" not in (text := self.log.read_text(errors="replace")):
            assert self.process.poll() is None, text
            assert time.monotonic() < end, text
            time.sleep(0.1)

    def kill(self) -> None:
        """Take it off as a power cut would: raylet, workers and all at once."""
        for pid in descendants(self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


class Cluster:
    """Machines with ``cpus`` cores each; the head has none, so that it can outlive them."""

    def __init__(self, folder: Path, *, nodes: int, cpus: int = 1) -> None:
        self.folder, self.cpus = folder, cpus
        self.port = free_port()
        self.address = f"{HEAD}:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        # A socket's path may be 107 bytes long.
        temporary = Path("/tmp") / f"wi-ray-{os.getpid()}-{self.port}"
        self.head = Node(
            [
                "--head", f"--port={self.port}", f"--node-ip-address={HEAD}", "--num-cpus=0",
                "--num-gpus=0", "--include-dashboard=false", f"--temp-dir={temporary}",
                "--object-store-memory=80000000",
            ],
            folder / "head.log",
        )  # fmt: skip
        self.nodes: dict[str, Node] = {}
        self.head.await_start()
        # Started side by side on one machine, they take each other's ports.
        for _ in range(nodes):
            self.add()

    def add(self) -> str:
        """Start one more machine; return its name."""
        count = len(list(self.folder.glob("node*.log")))
        name = f"node{count}"
        self.nodes[name] = Node(
            [
                f"--address={self.address}", f"--node-ip-address=127.0.0.{count + 3}",
                f"--num-cpus={self.cpus}", "--num-gpus=0", "--object-store-memory=80000000",
            ],
            self.folder / f"{name}.log",
        )  # fmt: skip
        self.nodes[name].await_start()
        return name

    def stop(self) -> None:
        """Take all of it down."""
        for node in (*self.nodes.values(), self.head):
            node.kill()
