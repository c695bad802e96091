"""A real S3 server on this machine, for tests and benchmarks; it lives as long as a block.

It is, in this order: the one that ``HANDOFF_S3_ENDPOINT`` names (with the usual ``AWS_*``
credentials), ``versitygw`` on PATH, versitygw built with Go into the user's cache (about a
minute, once), or moto, which is a stand-in and says so.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pyarrow import fs

from experiments.children import ChildError, die_with_parent
from kv.bucket import S3Settings

VERSION: Final = "v1.8.0"
MODULE: Final = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
ENDPOINT: Final = "HANDOFF_S3_ENDPOINT"
START_TIMEOUT_S: Final = 30.0
BUILD_TIMEOUT_S: Final = 480.0
STOP_TIMEOUT_S: Final = 5.0


@dataclass(slots=True)
class S3Server:
    """A server that runs, and how to reach it.

    Attributes:
        kind: ``external``, ``versitygw`` or ``moto``.
        settings: a bucket of our own on it.
        credentials: environment variables that a client needs.
        folder: where versitygw keeps its buckets, as plain files; None for the others.

    """

    kind: str
    settings: S3Settings
    credentials: Mapping[str, str] = field(repr=False)
    folder: Path | None = None
    _argv: tuple[str, ...] = ()
    _log: Path | None = None
    _process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What the server has printed."""
        return "" if self._log is None else self._log.read_text("utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """Process id of the server. Raises ``ChildError`` where it is not ours."""
        if self._process is None:
            raise ChildError(f"the S3 server at {self.settings.endpoint} is not ours to stop")
        return self._process.pid

    def start(self) -> None:
        """Start the server, again after ``stop``, on the same port. Moto has forgotten everything."""
        host, port = str(self.settings.endpoint).split(":")
        assert self._log is not None
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._argv,
                env={**os.environ, **self.credentials, **_root(self.credentials)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                break
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise ChildError(
                    f"{self.kind} does not listen on {host}:{port} within {START_TIMEOUT_S:g} s:\n"
                    f"{self.log[-2000:]}"
                )
            time.sleep(0.05)
        with environment(self.credentials):
            make_bucket(self.settings)

    def stop(self) -> None:
        """Kill the server; what it has stored stays."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def s3_server(
    kind: str | None = None, host: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[S3Server]:
    """Run a server with one bucket for the length of the block; credentials are in the environment meanwhile.

    A server of ours listens on ``host``; ``prefix`` comes before its command line (``cluster/netns.py``).

    Raises ``ChildError`` if no server, or none of that kind, can be had.
    """
    if kind in (None, "external") and (endpoint := os.environ.get(ENDPOINT)):
        yield from _external(endpoint)
        return
    credentials = {
        "AWS_ACCESS_KEY_ID": f"AK{secrets.token_hex(8)}",
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with tempfile.TemporaryDirectory(prefix="handoff-s3-") as temporary:
        address, folder = f"{host}:{_free_port()}", Path(temporary)
        data = folder / "data"
        data.mkdir()
        found, argv, files = _command(address, data, kind)
        settings = S3Settings(bucket="handoff-test", endpoint=address, scheme="http")
        server = S3Server(found, settings, credentials, files, (*prefix, *argv), folder / "log")
        try:
            server.start()
            with environment(credentials):
                yield server
        finally:
            server.stop()


def _external(endpoint: str) -> Iterator[S3Server]:
    scheme, _, address = endpoint.rpartition("://")
    settings = S3Settings(
        bucket=f"handoff-test-{secrets.token_hex(4)}",
        region=os.environ.get("AWS_REGION", "us-east-1"),
        endpoint=address.rstrip("/"),
        scheme="http" if scheme == "http" else "https",
    )
    client = make_bucket(settings)
    try:
        yield S3Server("external", settings, {})
    finally:
        client.delete_dir(settings.bucket)


def _command(address: str, data: Path, kind: str | None) -> tuple[str, tuple[str, ...], Path | None]:
    """Return kind, command line and the folder with the objects."""
    if kind in (None, "versitygw") and (program := find()) is not None:
        return "versitygw", (program, "--port", address, "--quiet", "posix", str(data)), data
    if kind in (None, "moto") and find_spec("moto") is not None:
        host, port = address.split(":")
        return "moto", (sys.executable, "-m", "moto.server", "-H", host, "-p", port), None
    raise ChildError(
        f"no S3 server{f' of kind {kind}' if kind else ''}: set {ENDPOINT} to one (and AWS_ACCESS_KEY_ID, "
        f"AWS_SECRET_ACCESS_KEY), install Go or versitygw, or install the extra `dev`, which has moto"
    )


def find() -> str | None:
    """Return the path of versitygw: on PATH, built before, or built now; None without Go."""
    if (program := shutil.which("versitygw")) is not None:
        return program
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "handoff" / f"versitygw-{VERSION}"
    )
    program_path = cache / "versitygw"
    if program_path.exists():
        return str(program_path)
    go = shutil.which("go")
    if go is None:
        return None
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent, prefix="build-") as temporary:
        built = subprocess.run(
            [go, "install", MODULE],
            env={**os.environ, "GOBIN": temporary},
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
        if built.returncode:
            return None
        cache.mkdir(exist_ok=True)
        (Path(temporary) / "versitygw").replace(program_path)  # at once, whoever else builds it
    return str(program_path)


def make_bucket(settings: S3Settings) -> Any:
    """Make the settings' bucket; return the client that did."""
    client = fs.S3FileSystem(
        region=settings.region,
        endpoint_override=settings.endpoint,
        scheme=settings.scheme,
        allow_bucket_creation=True,
        allow_bucket_deletion=True,
    )
    client.create_dir(settings.bucket)
    return client


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the length of a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _root(credentials: Mapping[str, str]) -> dict[str, str]:
    """Return versitygw's names for them; in the environment, where process lists do not show them."""
    return {
        "ROOT_ACCESS_KEY": credentials["AWS_ACCESS_KEY_ID"],
        "ROOT_SECRET_KEY": credentials["AWS_SECRET_ACCESS_KEY"],
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
