"""A Kubernetes API server by itself, with KubeRay's definitions: it judges manifests, and runs nothing."""

import contextlib
import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from cluster.network import free_ports

PROJECT = Path(__file__).resolve().parents[2]
BUILD = PROJECT / "tests" / "k8s" / "lab" / "build.sh"
OPERATOR = "github.com/ray-project/kuberay/ray-operator@v1.6.1"
BUILT_WITHIN_S, UP_WITHIN_S, ASKED_WITHIN_S = 1500.0, 120.0, 60.0


@dataclass(frozen=True)
class ApiServer:
    """It, and the file by which kubectl finds it."""

    kubeconfig: Path

    def kubectl(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        argv = ["kubectl", "--kubeconfig", self.kubeconfig, *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=ASKED_WITHIN_S, check=False)

    def judge(self, *manifests: str | Path) -> subprocess.CompletedProcess[str]:
        """Have it say what it would do with manifests, strictly; `-f` or `-k` before each."""
        return self.kubectl("apply", *manifests, "--dry-run=server", "--validate=strict")


def no_modules() -> str:
    """Why Go modules cannot be had here; an empty text if they can."""
    argv = ["go", "mod", "download", "-json", OPERATOR]
    done = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0:
        return ""
    return f"{OPERATOR} cannot be had, set GOPROXY: {done.stdout[-500:]}{done.stderr[-500:]}"


def built() -> tuple[Path, list[Path]]:
    """Build the server, unless it has been; return its program and the folders of definitions."""
    done = subprocess.run(
        [BUILD, "kube-apiserver"], capture_output=True, text=True, timeout=BUILT_WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cache = Path(done.stdout.splitlines()[-1])
    operator = Path((cache / "kuberay").read_text("utf-8").strip())
    return cache / "bin" / "kube-apiserver", [operator / "config" / "crd" / "bases", cache / "definitions"]


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Run one, with a store of its own, for the length of the block."""
    program, definitions = built()
    client, peer, port = free_ports(3)
    token = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f"{token},test,test\n", "utf-8")
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "accounts.key").write_bytes(key)
    server = ApiServer(_kubeconfig(folder, port, token))
    store = f"http://127.0.0.1:{client}"
    etcd = ["etcd", "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"]
    etcd += [f"--{name}-client-urls={store}" for name in ("listen", "advertise")]
    etcd += [f"--listen-peer-urls=http://127.0.0.1:{peer}"]
    options = {
        "etcd-servers": store,
        "bind-address": "127.0.0.1",
        "secure-port": port,
        "advertise-address": "198.51.100.1",  # nobody's: loopback is refused, and nobody is told of it
        "endpoint-reconciler-type": "none",
        "cert-dir": folder / "certificates",
        "token-auth-file": folder / "tokens.csv",
        "authorization-mode": "AlwaysAllow",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": folder / "accounts.key",
        "service-account-signing-key-file": folder / "accounts.key",
        "service-cluster-ip-range": "10.96.0.0/16",
    }
    argv = [str(program), *(f"--{name}={value}" for name, value in options.items())]
    with _running(etcd, folder / "etcd.log"), _running(argv, folder / "server.log") as process:
        _until_ready(server, process, folder / "server.log")
        files = [argument for each in definitions for argument in ("-f", str(each))]
        applied = server.kubectl("apply", "--server-side", *files)
        assert applied.returncode == 0, applied.stderr
        _until_established(server)
        yield server


def _until_established(server: ApiServer) -> None:
    """Return when the server knows the definitions; on a busy machine it may not even list them at first."""
    deadline = time.monotonic() + UP_WITHIN_S
    while True:
        waited = server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        if waited.returncode == 0:
            return
        assert time.monotonic() < deadline, (
            f"the definitions are not established after {UP_WITHIN_S:g} s: {waited.stderr}"
        )
        time.sleep(1)


def _kubeconfig(folder: Path, port: int, token: str) -> Path:
    """The server's certificate is one that it makes for itself."""
    cluster = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(content), "utf-8")
    return path


@contextlib.contextmanager
def _running(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _until_ready(server: ApiServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + UP_WITHIN_S
    while server.kubectl("get", "--raw=/readyz").returncode != 0:
        said = log.read_text("utf-8", errors="replace")[-2000:]
        assert process.poll() is None, f"the API server has ended:\n{said}"
        assert time.monotonic() < deadline, f"the API server is not ready after {UP_WITHIN_S:g} s:\n{said}"
        time.sleep(0.5)
