"""The S3 server of tests and benchmarks: which one is taken, that it ends, and that its keys stay secret."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from experiments import s3_server as module
from experiments.children import ChildError
from experiments.s3_server import ENDPOINT, find, make_bucket, s3_server

WAIT_S = 20.0
HOLDER = """
import time
from experiments.s3_server import s3_server
with s3_server() as server:
    print(server.pid, flush=True)
    time.sleep(60)
"""


def gone(pid: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)


def test_it_serves_for_the_length_of_a_block_and_hides_its_keys() -> None:
    before = dict(os.environ)
    with s3_server() as server:
        secrets = [server.credentials["AWS_ACCESS_KEY_ID"], server.credentials["AWS_SECRET_ACCESS_KEY"]]
        assert os.environ["AWS_SECRET_ACCESS_KEY"] == secrets[1]
        make_bucket(server.settings)  # it is there already
        shown = " ".join(psutil.Process(server.pid).cmdline()) + repr(server) + server.log
        assert not any(secret in shown for secret in secrets)
        pid = server.pid
    assert gone(pid)
    assert dict(os.environ) == before


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_whoever_started_it(end: signal.Signals, tmp_path: Path) -> None:
    find()  # builds it, if need be, outside of the wait
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # nobody else removes its folder
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    pid = int(holder.stdout.readline())
    assert psutil.pid_exists(pid)
    holder.send_signal(end)
    holder.wait(WAIT_S)
    assert gone(pid)


def test_the_one_that_is_named_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as running:
        monkeypatch.setenv(ENDPOINT, f"http://{running.settings.endpoint}")
        with s3_server() as named:
            assert named.kind == "external"
            assert named.settings.endpoint == running.settings.endpoint
            bucket = named.settings.bucket
            with pytest.raises(ChildError, match="is not ours to stop"):
                _ = named.pid
            if running.folder is not None:
                assert (running.folder / bucket).exists()
        if running.folder is not None:
            assert not (running.folder / bucket).exists()


def test_the_one_on_path_comes_before_one_that_was_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "versitygw"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find() == str(program)


def test_without_go_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find() is None
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(ChildError, match=f"set {ENDPOINT} to one"), s3_server():
        pass


def test_a_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "versitygw"
    program.write_text("#!/bin/sh\necho no disk\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ChildError, match="no disk"), s3_server():
        pass
