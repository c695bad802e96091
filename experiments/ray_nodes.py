"""Bare Ray nodes for an experiment, each where it is told to be: in a network namespace, or here."""

import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from cluster.launch import AGENT_PORTS, NODE_NAME, UNWANTED, cluster_environment
from cluster.network import free_ports
from experiments.children import Child, ChildError, child

START_S: Final = 90.0
_STARTED: Final = "Ray runtime started"
_PROJECT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class RayNodes:
    """A running Ray cluster.

    Attributes:
        address: HOST:PORT of its control store.
        environment: what a driver of it needs, its token's path among it.
        nodes: the processes that keep its nodes, in the order they were asked for.

    """

    address: str
    environment: Mapping[str, str]
    nodes: Sequence[Child]

    def cpu_s(self) -> float:
        """Return the CPU seconds that all processes of all nodes have used."""
        total = 0.0
        for node in self.nodes:
            for process in node.processes():
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total


@contextlib.contextmanager
def ray_nodes(
    places: Sequence[tuple[str, Sequence[str]]],
    object_store: int,
    options: Sequence[Sequence[str]] = (),
    names: Sequence[str] = (),
) -> Iterator[RayNodes]:
    """Start one node at each (address, command prefix), the first being the head; end them after the block.

    Token authentication is on. ``object_store`` is in bytes, for each node, all of it in memory from the
    start; ``options`` go to `ray start` on each, later ones winning; ``names`` are what the nodes' processes
    find in ``NODE_NAME``. Raises ``ChildError`` if a node ends or is late.
    """
    with contextlib.ExitStack() as stack:
        # Unix socket paths end at 107 bytes, and Ray's own part takes about 70 of them.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")))
        token = folder / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32), "ascii")
        environment = {
            **cluster_environment("unused", token, _PROJECT),
            **dict.fromkeys(UNWANTED, ""),
        }
        ports = free_ports(1 + len(AGENT_PORTS) * len(places))
        head = f"{places[0][0]}:{ports[0]}"
        nodes: list[Child] = []
        for index, (address, prefix) in enumerate(places):
            agents = ports[1 + index * len(AGENT_PORTS) :]
            argv = [
                *("-m", "ray.scripts.scripts", "start", "--block"),
                *(
                    ("--head", f"--port={ports[0]}", "--include-dashboard=false", "--no-monitor")
                    if index == 0
                    else (f"--address={head}",)
                ),
                f"--node-ip-address={address}",
                f"--temp-dir={folder / str(index)}",
                f"--object-store-memory={object_store}",
                *("--num-cpus=1", "--num-gpus=0", "--min-worker-port=0", "--max-worker-port=0"),
                *(f"--{option}={port}" for option, port in zip(AGENT_PORTS, agents, strict=False)),
                *("--include-log-monitor=false", "--disable-usage-stats", "--log-style=record"),
                *(options[index] if options else ()),
            ]
            named = {**environment, NODE_NAME: names[index]} if names else environment
            node = stack.enter_context(child(f"ray-{index}", argv, named, prefix=prefix))
            _wait_for(node)
            nodes.append(node)
        yield RayNodes(head, environment, nodes)


def _wait_for(node: Child) -> None:
    deadline = time.monotonic() + START_S
    while _STARTED not in node.log.read_text("utf-8", errors="replace"):
        if node.process.poll() is not None or time.monotonic() > deadline:
            raise ChildError(f"{node.name} did not start in {START_S:g} s:\n{node.tail()}")
        time.sleep(0.1)
