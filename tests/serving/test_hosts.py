"""`ray up` for real: two machines with an sshd each, made of namespaces, and a request through both."""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from asking import Endpoint
from limits import ENGINE

from cluster import netns
from experiments.results import check

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.hosts]

PROJECT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
HOME = pwd.getpwuid(os.geteuid()).pw_dir
GONE_WITHIN_S = 60.0
TOOLS = {"sshd": "openssh-server", "ssh-keygen": "openssh-client", "ssh": "openssh-client", "rsync": "rsync"}
SSHD = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
"""
PROFILE = f"""\
export PATH={BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
export PYTHONPATH={PROJECT} VLLM_CPU_OMP_THREADS_BIND=nobind
"""
MACHINE = """\
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /tmp/ray
{keep}
mount --rbind {folder}/{name} {home}
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
hostname {name}
exec {sshd} -D -e -f {folder}/{name}.conf
"""


def missing() -> str | None:
    """Say why there can be no such machines here."""
    if (reason := netns.missing()) is not None:
        return reason
    path = f"{os.environ['PATH']}:/usr/sbin"
    if absent := [tool for tool in TOOLS if shutil.which(tool, path=path) is None]:
        packages = " ".join(sorted({TOOLS[tool] for tool in absent}))
        return f"{', '.join(absent)} not found: apt-get install {packages}"
    return None


@dataclass(frozen=True)
class Machines:
    """Two machines, and the way into them."""

    addresses: Sequence[str]
    folder: Path
    running: Sequence[subprocess.Popen[bytes]]

    def ssh(self, index: int, command: str) -> subprocess.Popen[str]:
        """Start a command on one of them."""
        options = (
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
            "ConnectTimeout=10",
        )
        argv = ["ssh", "-tt", "-i", str(self.folder / "key"), *(f"-o{option}" for option in options)]
        return subprocess.Popen(
            [*argv, f"root@{self.addresses[index]}", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self, name: str) -> list[str]:
        """The command lines on all machines in which a word occurs."""
        found = []
        for machine in self.running:
            for process in psutil.Process(machine.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    found.append(" ".join(process.cmdline()))
        return [line for line in found if name in line]


@pytest.fixture
def machines() -> Iterator[Machines]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert sshd is not None
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="handoff-hosts-")))
        for key in ("key", "host_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True
            )
        network = stack.enter_context(netns.network(2, attach_host=True))
        Path("/tmp/ray").mkdir(exist_ok=True)  # each machine has its own there
        running = []
        for node in network.nodes:
            name = f"machine{node.index}"
            (folder / name).mkdir()
            values = {
                "keep": "\n".join(_kept(folder / name)),
                "home": HOME,
                "folder": folder,
                "name": name,
                "address": node.address,
                "sshd": sshd,
            }
            (folder / name / ".profile").write_text(PROFILE)
            (folder / f"{name}.conf").write_text(SSHD.format(**values))
            argv = (
                "unshare",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "--uts",
                "bash",
                "-c",
            )
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                [*node.prefix, *argv, MACHINE.format(**values)], stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(_end, process)
            running.append(process)
        yield Machines([node.address for node in network.nodes], folder, running)


def _kept(home: Path) -> Iterator[str]:
    """Each machine has a home of its own; what the tests run from stays visible in it."""
    for path in {PROJECT, Path(sys.prefix), Path(sys.base_prefix)}:
        if path.is_relative_to(HOME):
            place = home / path.relative_to(HOME)
            yield f"mkdir -p {place}; mount --rbind {path} {place}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)  # and with it all of its process namespace
    process.wait(10)


def ray(arguments: Sequence[str], environment: Mapping[str, str], within_s: float) -> str:
    """Run a command of Ray's; return what it printed."""
    done = subprocess.run(
        [str(BIN / "ray"), *arguments], env=environment, capture_output=True, text=True, timeout=within_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def placed(file: Path, ray_file: Path, environment: Mapping[str, str]) -> None:
    """The placement experiment on the machines, as docs/experiments.md says."""
    command = f"handoff experiment placement {file} --repeats 1 --medium store --out placement.json"
    print(ray(["exec", str(ray_file), command], environment, 200))
    out = file.parent / "placement.json"
    ray(["rsync-down", str(ray_file), "~/placement.json", str(out)], environment, 60)
    run = check(out)
    assert run.results["pods"] == {"0a": "decode-0", "1a": "prefill-0"}
    measured = {row["case"]: sorted(row["by_machine_s_p50"]) for row in run.results["rows"]}
    assert measured == {"store 1 x1": ["1"], "store 3 x1": ["0"], "store 3 x2": ["0"], "store 5 x1": ["1"]}


def test_ray_up_serves_a_request_and_ray_down_leaves_nothing(
    machines: Machines, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "hosts.yaml"
    content = {
        "name": f"h{secrets.token_hex(4)}",
        "model": str(model),
        "engine": ENGINE,
        "router": {"mode": "always"},
        "transport": "tcp",
        "gateway": {"host": "0.0.0.0", "port": 8000},
        "hosts": {
            "head": "prefill-0",
            "nodes": dict(zip(("prefill-0", "decode-0"), machines.addresses, strict=True)),
            "ssh_user": "root",
            "ssh_key": str(machines.folder / "key"),
            # nodes end once they have missed the head for so long; a minute, unless it is set
            "env": {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"},
        },
        "nodes": {
            role: {"role": role, "memory": "3GiB", "object_store": "160MiB"} for role in ("prefill", "decode")
        },
    }
    file.write_text(yaml.safe_dump(content))
    subprocess.run(
        [sys.executable, "-m", "handoff.cli", "render", str(file), "--out", str(tmp_path / "ray.yaml")],
        check=True,
        cwd=PROJECT,
        timeout=60,
    )
    home = tmp_path / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").touch(0o600)
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    environment = {**os.environ, "HOME": str(home), "TERM": "dumb"}

    ray(["up", "-y", "--no-config-cache", str(tmp_path / "ray.yaml")], environment, 300)
    assert machines.processes("raylet/raylet")
    placed(file, tmp_path / "ray.yaml", environment)
    serve = machines.ssh(0, f"bash -lc 'exec handoff serve {file}'")
    try:
        url, printed = f"http://{machines.addresses[0]}:8000", list[str]()
        assert serve.stdout is not None
        for line in serve.stdout:
            printed.append(line)
            if "press Ctrl-C" in line:
                break
        assert printed, "nothing was printed"
        assert "press Ctrl-C" in printed[-1], "".join(printed)
        endpoint = Endpoint(url, model.name)
        answer = endpoint.http.post(
            "/v1/completions",
            json={"model": model.name, "prompt": "From one machine to the other. " * 20, "max_tokens": 16},
        )
        assert answer.json()["usage"]["completion_tokens"] == 16
        assert answer.headers["x-handoff-path"].startswith("prefill-worker-0>decode-worker-0; tcp")
        nodes = {name: worker["node"] for name, worker in endpoint.workers().items()}
        assert nodes == {"prefill-worker-0": "prefill-0", "decode-worker-0": "decode-0"}
        assert serve.stdin is not None
        serve.stdin.write("\x03")  # Ctrl-C in its terminal
        serve.stdin.flush()
        serve.stdout.read()
        assert serve.wait(60) == 0
    except BaseException:
        look = machines.ssh(0, "tail -n 40 /tmp/ray/session_latest/logs/monitor*")
        print(look.communicate(timeout=30)[0])
        raise
    finally:
        serve.kill()
        ray(["down", "-y", str(tmp_path / "ray.yaml")], environment, 120)
        for left in Path("/tmp/ray").glob(f"cluster-{content['name']}.*"):
            left.unlink()
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := machines.processes("ray"):
        assert time.monotonic() < deadline, f"ray down left {left}"
        time.sleep(0.5)
