import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster.network import free_ports
from experiments.children import ChildError, child

# A child with a grandchild in a session of its own, both deaf to SIGTERM; "here" says that both run.
STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import time; time.sleep(600)"
grandchild = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(grandchild.pid))
time.sleep(600)
"""


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)
    return path.read_text()


def test_nothing_of_a_child_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.children.GRACE_S", 0.5)
    with child("stubborn", ["-c", STUBBORN, "{folder}/here"], {}) as running:
        grandchild = int(wait_for(running.folder / "here"))
        assert {p.pid for p in running.processes()} == {running.process.pid, grandchild}
    assert not psutil.pid_exists(running.process.pid)
    assert not psutil.pid_exists(grandchild)
    assert not running.folder.exists()


def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from experiments.children import child\n"
            "code = 'import pathlib,sys,os,time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); "
            "time.sleep(600)'\n"
            "with child('orphan', ['-c', code, sys.argv[1]], {}): time.sleep(600)",
            str(tmp_path / "here"),
        ]
    )
    orphan = psutil.Process(int(wait_for(tmp_path / "here")))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    psutil.wait_procs([orphan], timeout=10)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_a_failure_quotes_what_the_child_printed() -> None:
    with child("failing", ["-c", "raise SystemExit('no such model')"], {}) as running:
        running.process.wait(30)
        with pytest.raises(ChildError, match=r"failing ended with exit code 1:\n  no such model"):
            running.check()


def test_files_are_there_from_the_start() -> None:
    code = "import sys; print(open(sys.argv[1]).read())"
    with child("reader", ["-c", code, "{folder}/asked"], {}, {"asked": "a question"}) as running:
        running.process.wait(30)
        running.check()
        assert running.tail() == "  a question"


SERVER = """
import http.server, sys, time
time.sleep(float(sys.argv[2]))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def test_a_server_is_waited_for_and_what_it_said_is_told_if_it_does_not_come() -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with child("late", ["{folder}/server.py", str(port), "0.5"], {}, {"server.py": SERVER}) as late:
        with pytest.raises(ChildError, match=r"late does not serve after 0 s:\n.*nothing was printed"):
            late.serves(url, 0.0)
        assert late.serves(url, 30.0) >= 0
    with (
        child("broken", ["{folder}/server.py", "x", "0"], {}, {"server.py": SERVER}) as broken,
        pytest.raises(ChildError, match=r"broken ended with exit code 1:\n[^$]*ValueError"),
    ):
        broken.serves(url, 30.0)
