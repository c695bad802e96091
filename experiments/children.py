"""Child processes of an experiment: none outlives it, whatever ends it."""

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import psutil

from cluster.launch import MARKER
from cluster.processes import end, marked

GRACE_S = 8.0
"""How long a child may take to end in order."""
TELL_EVERY_S = 5.0
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)  # loaded before any fork
_PROJECT: Final = Path(__file__).resolve().parent.parent


class ChildError(RuntimeError):
    """A child process failed; the message says which and quotes the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running child.

    Attributes:
        name: what it is called in messages.
        process: the process itself; its own children carry the same marker.
        marker: value of ``cluster.launch.MARKER`` in the environment of all of them.
        log: what it prints goes here.
        folder: its temporary folder, for files of ours too; removed at the end.

    """

    name: str
    process: subprocess.Popen[bytes]
    marker: str
    log: Path
    folder: Path

    def processes(self) -> list[psutil.Process]:
        """Return the processes that live now."""
        return marked(self.marker)

    def check(self) -> None:
        """Raise ``ChildError`` if the child has ended with an error."""
        if self.process.poll() not in (None, 0):
            raise ChildError(f"{self.name} ended with exit code {self.process.returncode}:\n{self.tail()}")

    def serves(
        self, url: str, within_s: float, waiting: Callable[[float], None] = lambda waited: None
    ) -> float:
        """Wait until the HTTP server that it is answers ``/health``; return the seconds that took.

        ``waiting`` is told every few seconds. Raises ``ChildError`` if it ends, or takes longer than
        ``within_s``.
        """
        began = told = time.monotonic()
        while True:
            self.check()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    return time.monotonic() - began
            waited = time.monotonic() - began
            if waited > within_s:
                raise ChildError(f"{self.name} does not serve after {waited:.0f} s:\n{self.tail()}")
            if time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                waiting(waited)
            time.sleep(0.2)

    def tail(self, lines: int = 25) -> str:
        """Return the last lines it printed, indented."""
        text = self.log.read_text("utf-8", errors="replace").strip()
        return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (nothing was printed)"


@contextlib.contextmanager
def child(
    name: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    files: Mapping[str, str] | None = None,
    *,
    prefix: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
) -> Iterator[Child]:
    """Run ``python *argv`` for the length of the block, then end it with all its descendants.

    It gets SIGTERM when this process dies. ``{folder}`` in an argument stands for its temporary folder, where
    ``files`` (name to text) are from the start. ``prefix`` comes before the whole command line (a network
    namespace's, see ``cluster/netns.py``); the file descriptors ``pass_fds`` stay open in it.
    """
    marker = f"{name}:{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix=f"handoff-{name}-") as temporary:
        folder = Path(temporary)
        for file, text in (files or {}).items():
            (folder / file).write_text(text, "utf-8")
        log = folder / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*prefix, sys.executable, *(argument.replace("{folder}", temporary) for argument in argv)],
                env={**os.environ, **environment, MARKER: marker, "TMPDIR": temporary},
                cwd=_PROJECT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=die_with_parent,
            )
        try:
            yield Child(name, process, marker, log, folder)
        finally:
            _end(process, marker)


def _end(process: subprocess.Popen[bytes], marker: str) -> None:
    """SIGTERM lets it end in order, together with what it started; then everything is killed."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    end(marker)
    process.wait(GRACE_S)


def die_with_parent() -> None:
    """Runs in a child between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
