"""Systems of one machine measured one at a time: while one is asked, the others' processes are stopped.

A system's processes are those with ``HANDOFF_BENCH_SYSTEM=NAME`` in their environment, which every process
that they start inherits. All of a system is stopped (SIGSTOP), so that no part of it misses another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import psutil

VARIABLE: Final = "HANDOFF_BENCH_SYSTEM"
SEEN_WITHIN_S: Final = 5.0


class ApartError(RuntimeError):
    """A system cannot be told from others; the message says which, and what to do."""


def processes(name: str) -> list[psutil.Process]:
    """Return a system's live processes, never this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ends meanwhile, or is another user's
            if process.environ().get(VARIABLE) == name and process.pid != os.getpid():
                found.append(process)
    return found


@contextlib.contextmanager
def apart(names: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Yield what lets one system run and stops the others; after the block all run.

    Raises:
        ApartError: a system has no process here.

    """
    if lacking := [name for name in names if not processes(name)]:
        raise ApartError(
            f"--apart: no process has {VARIABLE}={lacking[0]} in its environment; start that system with it: "
            f"{VARIABLE}={lacking[0]} handoff serve FILE"
        )

    def only(name: str) -> None:
        for other in names:
            if other != name:
                _stop(other)
        _send(name, signal.SIGCONT)

    try:
        yield only
    finally:
        for name in names:
            _send(name, signal.SIGCONT)


def _stop(name: str) -> None:
    """Stop a system, with what it starts meanwhile."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while running := [one for one in processes(name) if _runs(one)]:
        if time.monotonic() > deadline:
            raise ApartError(f"--apart: {name}: {running[0]} does not stop within {SEEN_WITHIN_S:g} s")
        for process in running:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGSTOP)
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _send(name: str, number: signal.Signals) -> None:
    for process in processes(name):
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
