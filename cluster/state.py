"""The folder that a running local cluster leaves its traces in, and the lock that says whether it runs.

$XDG_STATE_HOME/handoff/NAME/      (default ~/.local/state/handoff/NAME/)
    lock            held by the supervisor and its reaper; who can take it knows that neither lives
    cluster.json    Plan: what to start; written before anything starts
    nodes.json      Status: what became of each node; written by the supervisor
    token           Ray's authentication token, readable by its owner only
    logs/           what the supervisor and each `ray start` printed
$XDG_STATE_HOME/handoff/NAME.failed/   logs of the last bring-up that failed
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.file import ClusterFile
from cluster.launch import NodeLaunch
from cluster.processes import end

M = TypeVar("M", bound=BaseModel)
NodeState = Literal["waiting", "starting", "alive", "dead"]


class Plan(BaseModel):
    """Everything the supervisor needs, and what later commands need to find the cluster.

    net: first three parts of the nodes' addresses, where each but the head is in a network namespace.
    """

    model_config = ConfigDict(frozen=True)

    marker: str
    address: str
    temp_dir: Path
    file: ClusterFile
    nodes: tuple[NodeLaunch, ...]
    net: str | None = None


class NodeStatus(BaseModel):
    """What the supervisor knows of a node's `ray start` process.

    alive: it has seen the node in the control store. `starts` counts the attempts.
    """

    model_config = ConfigDict(frozen=True)

    state: NodeState = "waiting"
    pid: int | None = None
    exit_code: int | None = None
    starts: int = 0


class Status(BaseModel):
    """What the supervisor last wrote: its own process id, its parent's, and the state of each node."""

    model_config = ConfigDict(frozen=True)

    supervisor_pid: int
    reaper_pid: int
    nodes: dict[str, NodeStatus]


def home() -> Path:
    """Folder of all local clusters of this user."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "handoff"


class StateDir:
    """The folder of one cluster. Makes nothing on disk until told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token: Final = path / "token"
        self.logs: Final = path / "logs"
        self._lock: Final = path / "lock"
        self._plan: Final = path / "cluster.json"
        self._status: Final = path / "nodes.json"

    @classmethod
    def of(cls, name: str) -> "StateDir":
        """The folder of the cluster called `name`."""
        return cls(home() / name)

    @property
    def failed(self) -> Path:
        """Where the logs of a failed bring-up are kept."""
        return self.path.with_name(self.path.name + ".failed")

    def log_of(self, node: str) -> Path:
        """What `ray start` printed for a node; the name `supervisor` stands for the supervisor itself."""
        return self.logs / f"{node}.log"

    def try_lock(self) -> int | None:
        """File descriptor that holds the lock, or None if a living process holds it.

        The lock lasts until every copy of the descriptor is closed, those of child processes included.
        """
        while True:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                fd = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:  # the folder was removed meanwhile
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._lock.exists() and os.fstat(fd).st_ino == self._lock.stat().st_ino:
                    return fd
            except BlockingIOError:
                os.close(fd)
                return None
            except FileNotFoundError:
                pass
            os.close(fd)  # the holder removed the file after we opened it: this is a lock on nothing

    def locked(self) -> bool:
        """Whether a living process holds the lock. Makes nothing on disk."""
        try:
            fd = os.open(self._lock, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def write_token(self, token: str) -> None:
        """Store the token so that only its owner can read it, from the first moment on."""
        fd = os.open(self.token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(token)

    def write_plan(self, plan: Plan) -> None:
        """Store what is to be started."""
        _write(self._plan, plan)

    def write_status(self, status: Status) -> None:
        """Store what became of the nodes."""
        _write(self._status, status)

    def plan(self) -> Plan | None:
        """What was to be started, or None if that was never stored."""
        return _read(self._plan, Plan)

    def status(self) -> Status | None:
        """What became of the nodes, or None before the supervisor has written it."""
        return _read(self._status, Status)

    def keep_logs(self) -> None:
        """Make `clean` keep the logs even if no node died."""
        (self.path / "keep-logs").touch()

    def clean(self) -> None:
        """End what is left of the cluster and remove its files. Only for the holder of the lock.

        The logs move to `failed`, Ray's own included, if a node died or `keep_logs` was called.
        """
        plan, status = self.plan(), self.status()
        if plan is not None:
            end(plan.marker)
            died = status is not None and any(node.state == "dead" for node in status.nodes.values())
            if died or (self.path / "keep-logs").exists():
                self._move_logs(plan)
            shutil.rmtree(plan.temp_dir, ignore_errors=True)
        self._remove()

    def _remove(self) -> None:
        """Remove the folder, the lock last: who takes the name next must not find us still at work in it."""
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry != self._lock:
                entry.unlink(missing_ok=True)
        self._lock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody has taken the name already
            self.path.rmdir()

    def _move_logs(self, plan: Plan) -> None:
        shutil.rmtree(self.failed, ignore_errors=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        shutil.move(self.logs, self.failed)
        for index, node in enumerate(plan.nodes):
            for logs in plan.temp_dir.glob(f"{index}/session_2*/logs"):
                shutil.copytree(logs, self.failed / f"{node.name}.ray", dirs_exist_ok=True)


def _write(path: Path, model: BaseModel) -> None:
    """Replace `path` in one step: a reader sees the old or the new text, never half of one."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(model.model_dump_json(), encoding="utf-8")
    draft.replace(path)


def _read(path: Path, kind: type[M]) -> M | None:
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError:  # written by another version of this package
        return None
