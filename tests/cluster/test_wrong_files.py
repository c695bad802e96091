"""Wrong cluster files and environments: `handoff up` and `handoff render` say what, where and what to do.

Each row is one mistake in a file that is right, or in what surrounds it. Nothing is started.
"""

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import preflight, start
from cluster.file import load
from deployments import store
from experiments.s3_server import S3Server
from handoff import cli, serve

RIGHT = """\
name: right
model: model
engine: {max_model_len: 4096, kv_cache_memory_bytes: 268435456}
gateway: {port: 0}
nodes:
  fast: {role: prefill, count: 2, cpus: 4, memory: 4GiB, object_store: 100MiB, labels: {zone: x}}
  wide: {role: decode, cpus: 2, slots: 2}
workers:
  prefill: {count: 2, cpus: 4, labels: {zone: x}}
  decode: {count: 2, cpus: 1}
s3: {bucket: kv-cache, endpoint: "store.lan:9000"}
slo: {ttft_ms: 2000}
"""
HOSTS = """\
hosts: {head: 10.0.0.1, ssh_user: me, nodes: {fast-0: 10.0.0.2, fast-1: 10.0.0.3, wide-0: 10.0.0.4}}
"""
MODEL = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 512,
    "max_position_embeddings": 8192,
}
"""8 KiB of KV per token in 16 bits."""


@dataclass
class Place:
    """A right file, and what surrounds it."""

    folder: Path
    text: str
    patch: pytest.MonkeyPatch

    def change(self, old: str, new: str) -> None:
        assert self.text.count(old) == 1, f"{old!r} is not once in the right file"
        self.text = self.text.replace(old, new)

    def write(self) -> Path:
        path = self.folder / "cluster.yaml"
        path.write_text(self.text)
        return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    for name in (
        *preflight._ROLE_OF_MACHINE,
        "AWS_PROFILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_CONFIG_FILE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("HOME", str(tmp_path))
    return Place(tmp_path, RIGHT, monkeypatch)


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    started: list[object] = []
    for name in ("_lock", "_plan", "_spawn"):
        monkeypatch.setattr(start, name, lambda *args: started.append(args) or pytest.fail("something began"))
    yield
    assert not started


def said(capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, *argv: str) -> str:
    """Run a command that fails; return the message."""
    patch.setattr("sys.argv", ["handoff", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert ended.value.code == 1, printed.err
    assert printed.err.startswith("error: ")
    assert "Traceback" not in printed.err
    assert "this may be a mistake in handoff" not in printed.err
    assert "the-secret" not in printed.err
    assert printed.out == ""
    return printed.err


FILES = {
    "unknown key": ("memory: 4GiB", "memmory: 4GiB", ["nodes.fast.memmory", "did you mean 'memory'?"]),
    "unknown section": ("slo:", "slos:", ["slos: unknown key", "did you mean 'slo'?"]),
    "key twice": (
        "  wide: {role: decode, cpus: 2, slots: 2}",
        "  wide: {role: decode}\n  wide: {role: decode}",
        ["'wide' is there twice", "keep one", "line 8"],
    ),
    "section without content": ("gateway: {port: 0}", "gateway:", ["gateway: None", "host, port, replicas"]),
    "list for mapping": (
        "slo: {ttft_ms: 2000}",
        "slo: [2000]",
        ["slo: [2000]", "mapping", "ttft_ms, tpot_ms"],
    ),
    "missing model": ("model: model\n", "", ["model: missing", "required"]),
    "wrong unit of memory": ("4GiB", "4Gi", ["nodes.fast.memory: '4Gi'", 'did you mean "4GiB"?']),
    "unit with a number": ("4GiB", "lots", ["nodes.fast.memory: 'lots'", '"4GiB" or "500MB"']),
    "object store too small for Ray": ("100MiB", "10MiB", ["nodes.fast.object_store: '10MiB'", "78643200"]),
    "wrong unit of time": (
        "ttft_ms: 2000",
        "ttft_ms: 2s",
        ["slo.ttft_ms: '2s'", "milliseconds, such as 2000"],
    ),
    "part of a CPU": (
        "wide: {role: decode, cpus: 2",
        "wide: {role: decode, cpus: 2.5",
        ["nodes.wide.cpus: 2.5"],
    ),
    "no node": (
        "count: 2, cpus: 4, m",
        "count: 0, cpus: 4, m",
        ["nodes.fast.count: 0", "greater than or equal to 1"],
    ),
    "misspelt role": (
        "role: decode",
        "role: decod",
        ["nodes.wide.role: 'decod'", "'prefill', 'decode' or 'both'"],
    ),
    "role without node": (
        "role: decode",
        "role: prefill",
        ["workers.decode asks for 2", "no node group offers the role 'decode'", "role: both"],
    ),
    "fewer workers at most than always": (
        "decode: {count: 2, cpus: 1}",
        "decode: {count: 2, most: 1, cpus: 1}",
        ["workers.decode.most is 1 and count is 2", "count from 1 to 1"],
    ),
    "no room for as many workers as there may be": (
        "decode: {count: 2, cpus: 1}",
        "decode: {count: 2, most: 3, cpus: 1}",
        ["decode-worker-2 fits on no node", "decode: 0 free of 2"],
    ),
    "no load for workers to follow": (
        "decode: {count: 2, cpus: 1}",
        "decode: {count: 1, most: 2, cpus: 1}\nrouter: {mode: replicas}",
        ["workers.decode.most is 2, but with router.mode: replicas", "adaptive or always"],
    ),
    "name with capitals": (
        "name: right",
        "name: Right",
        ["name: 'Right'", "lower-case letters, digits and dashes"],
    ),
    "group called head": ("  wide:", "  head:", ["nodes.head", "taken by the node of Ray's own services"]),
    "more workers than slots": (
        "decode: {count: 2",
        "decode: {count: 3",
        ["workers: decode-worker-2 fits on no node", "decode: 0 free of 2, 1 needed", "or slots"],
    ),
    "workers larger than nodes": (
        "prefill: {count: 2, cpus: 4",
        "prefill: {count: 2, cpus: 8",
        ["workers: prefill-worker-0 fits on no node", "CPU: 4 free of 4, 8 needed", "more cpus"],
    ),
    "worker on an unknown node": (
        "decode: {count: 2",
        "decode: {node: wide-1, count: 2",
        ["workers.decode.node is 'wide-1'", "valid: fast-0, fast-1, wide-0"],
    ),
    "worker on a node of the other role": (
        "decode: {count: 2",
        "decode: {node: fast-0, count: 2",
        ["decode-worker-0 fits on no node", "fast-0 (prefill): does not offer the role decode"],
    ),
    "label that no node has": (
        "4, labels: {zone: x}}\n  decode",
        "4, labels: {zone: y}}\n  decode",
        ["prefill-worker-0", "no node has zone=y", "there are: x"],
    ),
    "no worker at all": (
        "prefill: {count: 2, cpus: 4, labels: {zone: x}}\n  decode: {count: 2, cpus: 1}",
        "prefill: {count: 0}\n  decode: {count: 0}",
        ["workers: prefill.count and decode.count are both 0", "give one of them 1"],
    ),
    "label of Ray's": (
        "labels: {zone: x}}\n  wide",
        "labels: {ray.io/x: x}}\n  wide",
        ["'ray.io/x' is set by"],
    ),
    "ranks that do not divide heads": (
        "engine: {max",
        "engine: {tensor_parallel_size: 3, max",
        ["engine.tensor_parallel_size is 3", "4 key-value heads", "choose one of 1, 2, 4"],
    ),
    "pipeline": (
        "engine: {max",
        "engine: {pipeline_parallel_size: 2, max",
        ["engine.pipeline_parallel_size is 2", "cannot be handed over", "set it to 1"],
    ),
    "KV memory too small": (
        "268435456",
        "16777216",
        [
            *("engine.kv_cache_memory_bytes is 16777216 (16 MiB)", "2048 tokens", "4096 (max_model_len)"),
            *("at least 33554432 (32 MiB)", "or lower engine.max_model_len"),
        ],
    ),
    "KV blocks too few": (
        "kv_cache_memory_bytes: 268435456",
        "block_size: 64, num_gpu_blocks_override: 32",
        ["engine.num_gpu_blocks_override is 32", "2048 tokens", "at least 64"],
    ),
    "unknown engine option": (
        "max_model_len: 4096",
        "max_model_length: 4096",
        ["engine.max_model_length: vLLM has no such engine option", "did you mean 'max_model_len'?"],
    ),
    "engine option with a unit": (
        "268435456",
        "256MiB",
        ["engine.kv_cache_memory_bytes is '256MiB'", "whole number", "268435456"],
    ),
    "engine option that is set elsewhere": (
        "engine: {max",
        "engine: {port: 8000, max",
        ["engine.port cannot be set there", "gateway.port"],
    ),
    "option of the fake engine": (
        "engine: {max",
        "engine: {fake: {step: 1}, max",
        ["engine.fake: step: unknown key", "did you mean 'step_ms'?"],
    ),
    "transport": (
        "model: model\n",
        "model: model\ntransport: rdma\n",
        ["transport: 'rdma'", "'tcp'", "'nixl'"],
    ),
    "encrypted, but not possible": (
        "model: model\n",
        "model: model\ntransport: nixl\ntls: {certificate: /a, key: /b, authority: /c}\n",
        ["transport: nixl cannot be encrypted", "choose transport: tcp or auto"],
    ),
    "S3 without bucket": ("bucket: kv-cache, ", "", ["s3.bucket: missing"]),
    "S3 endpoint with a scheme": (
        '"store.lan:9000"',
        '"http://store.lan:9000"',
        ["s3.endpoint: 'http://store.lan:9000'", "HOST:PORT", "s3.scheme"],
    ),
    "secret in the file": (
        "bucket: kv-cache",
        "bucket: kv-cache, secret_key: x",
        ["s3.secret_key: unknown key"],
    ),
    "port beyond all ports": ("port: 0", "port: 80000", ["gateway.port: 80000", "65535"]),
    "link of an unknown node": (
        "slo: {ttft_ms: 2000}\n",
        "links: {gbit_s: 10, nodes: {wide-1: 1}}\n",
        ["links.nodes.wide-1: there is no such node", "valid: fast-0, fast-1, wide-0"],
    ),
    "rate of a link with a unit": (
        "slo: {ttft_ms: 2000}\n",
        "links: {gbit_s: 10Gbit}\n",
        ["links.gbit_s: '10Gbit'", "a number of Gbit/s, such as 10"],
    ),
    "map that is not there": (
        "slo: {ttft_ms: 2000}\n",
        "map: results/probe.json\n",
        ["map: ", "results/probe.json cannot be read", "handoff probe FILE", "leave the key `map` out"],
    ),
    "map that is something else": (
        "slo: {ttft_ms: 2000}\n",
        "map: model/config.json\n",
        ["map: ", "model/config.json is of kind None, not a map", "handoff probe FILE"],
    ),
    "links between real machines": (
        "slo: {ttft_ms: 2000}\n",
        HOSTS + "links: {gbit_s: 10}\n",
        ["links: are emulated on one machine", "leave one of them out"],
    ),
    "hosts without a node": (
        "slo: {ttft_ms: 2000}\n",
        HOSTS.replace(", wide-0: 10.0.0.4", ""),
        ["hosts.nodes: the address of wide-0 is missing"],
    ),
    "one machine for two nodes": (
        "slo: {ttft_ms: 2000}\n",
        HOSTS.replace("10.0.0.4", "10.0.0.2"),
        ["hosts: 10.0.0.2 is there twice", "more slots"],
    ),
    "token among the variables of hosts": (
        "slo: {ttft_ms: 2000}\n",
        HOSTS.replace("ssh_user", "env: {RAY_AUTH_TOKEN: x}, ssh_user"),
        ["hosts.env", "'RAY_AUTH_TOKEN' looks like a secret"],
    ),
}


@pytest.mark.parametrize("command", ["up", "render"])
@pytest.mark.parametrize(("old", "new", "parts"), FILES.values(), ids=FILES)
def test_a_wrong_file_is_refused_by_every_command(
    place: Place, capsys: pytest.CaptureFixture[str], command: str, old: str, new: str, parts: list[str]
) -> None:
    place.change(old, new)
    path = place.write()
    message = said(capsys, place.patch, command, str(path))
    for part in (str(path), *parts):
        assert part in message


def taken_port(place: Place) -> list[str]:
    sock = socket.create_server(("127.0.0.1", 0))
    place.patch.setattr(place, "socket", sock, raising=False)  # kept open for as long as the test
    port = sock.getsockname()[1]
    place.change("port: 0", f"port: {port}")
    return [f"gateway.port: {port} is taken", "set a free one"]


def foreign_host(place: Place) -> list[str]:
    place.change("{port: 0}", "{host: 203.0.113.7, port: 0}")
    return ["gateway.host: 203.0.113.7 is no address to listen on here", "0.0.0.0"]


def large_store(place: Place) -> list[str]:
    place.change("100MiB", "900TiB")
    return ["nodes: the object stores need", "of shared memory", "lower object_store"]


def no_model(place: Place) -> list[str]:
    place.change("model: model\n", "model: ./modle\n")
    return ["model: ./modle is no folder", "correct the path"]


def no_model_of_a_group(place: Place) -> list[str]:
    place.change("  wide: {", "  wide: {model: /nowhere/model, ")
    return ["nodes.wide.model: /nowhere/model is no folder"]


def no_config(place: Place) -> list[str]:
    (place.folder / "model" / "config.json").unlink()
    return ["model: ", "has no config.json", "Hugging Face layout"]


def no_weights(place: Place) -> list[str]:
    (place.folder / "model" / "model.safetensors").unlink()
    return ["model: ", "has no *.safetensors", "--engine fake"]


def no_credentials(place: Place) -> list[str]:
    place.patch.delenv("AWS_ACCESS_KEY_ID")
    place.patch.delenv("AWS_SECRET_ACCESS_KEY")
    return ["s3: no credentials for bucket 'kv-cache' at store.lan:9000", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"]


def half_of_the_credentials(place: Place) -> list[str]:
    place.patch.delenv("AWS_SECRET_ACCESS_KEY")
    return ["s3: AWS_ACCESS_KEY_ID is in the environment, and AWS_SECRET_ACCESS_KEY is not", "set both"]


def no_certificate(place: Place) -> list[str]:
    place.text += "tls: {certificate: /nowhere.pem, key: /nowhere.key, authority: /nowhere-ca.pem}\n"
    return ["3 mistakes", "tls.certificate: /nowhere.pem is no file", "tls.authority", "PEM"]


def no_keys(place: Place) -> list[str]:
    place.change("{port: 0}", "{port: 0, api_keys_file: /nowhere/keys}")
    return ["gateway.api_keys_file /nowhere/keys cannot be read", "No such file"]


def open_keys(place: Place) -> list[str]:
    (place.folder / "keys").write_text("the-secret\n")
    (place.folder / "keys").chmod(0o644)
    place.change("{port: 0}", f"{{port: 0, api_keys_file: {place.folder}/keys}}")
    return ["gateway.api_keys_file", "mode 0644", "chmod 600"]


def no_nixl(place: Place) -> list[str]:
    _without(place, "nixl")
    place.change("model: model\n", "model: model\ntransport: nixl\n")
    return ["transport: nixl needs NIXL", "pip install 'handoff[nixl]'", "choose tcp"]


def no_vllm(place: Place) -> list[str]:
    _without(place, "vllm")
    return ["engine: vLLM is not installed", "pip install"]


def other_machines(place: Place) -> list[str]:
    place.text += HOSTS
    return ["hosts: ", "10.0.0.1", "`handoff render`"]


def no_root(place: Place) -> list[str]:
    place.text += "links: {gbit_s: 1}\n"
    place.patch.setattr("os.geteuid", lambda: 1000)
    return ["links: each node would be a network namespace", "need root", "leave `links` out"]


def no_hub(place: Place) -> list[str]:
    place.patch.setattr("cluster.netns.missing", lambda: None)
    place.patch.delenv("HF_HUB_OFFLINE", raising=False)
    place.change("model: model\n", "model: org/model\nlinks: {gbit_s: 1}\n")
    return ["links: nodes in namespaces", "no hub", "org/model", "HF_HUB_OFFLINE=1"]


def _without(place: Place, package: str) -> None:
    found = preflight.importlib.util.find_spec
    place.patch.setattr("importlib.util.find_spec", lambda name: None if name == package else found(name))


ENVIRONMENTS = (
    taken_port,
    foreign_host,
    large_store,
    no_model,
    no_model_of_a_group,
    no_config,
    no_weights,
    no_credentials,
    half_of_the_credentials,
    no_certificate,
    no_keys,
    open_keys,
    no_nixl,
    no_vllm,
    other_machines,
    no_root,
    no_hub,
)


@pytest.mark.parametrize("wrong", ENVIRONMENTS, ids=lambda wrong: wrong.__name__)
def test_a_wrong_environment_is_refused_before_anything_starts(
    place: Place, capsys: pytest.CaptureFixture[str], wrong: Callable[[Place], list[str]]
) -> None:
    parts = wrong(place)
    message = said(capsys, place.patch, "up", str(place.write()))
    assert "'right' cannot be brought up here" in message
    for part in parts:
        assert part in message


def no_server(place: Place, s3: S3Server) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    place.change('"store.lan:9000"', f'"127.0.0.1:{port}"')
    return [f"bucket 'kv-cache' at 127.0.0.1:{port}", "cannot be reached", "check that the server runs"]


def no_bucket(place: Place, s3: S3Server) -> list[str]:
    place.change('"store.lan:9000"', f'"{s3.settings.endpoint}"')
    return [f"bucket 'kv-cache' at {s3.settings.endpoint}", "there is no such bucket; create it"]


def wrong_keys(place: Place, s3: S3Server) -> list[str]:
    place.change("kv-cache", s3.settings.bucket)
    place.change('"store.lan:9000"', f'"{s3.settings.endpoint}"')
    place.patch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    return [
        f"bucket {s3.settings.bucket!r} at {s3.settings.endpoint}",
        "refused",
        "check s3.region, the cred",
    ]


@pytest.mark.parametrize("wrong", [no_server, no_bucket, wrong_keys], ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("command", ["up", "serve"])
def test_a_store_that_cannot_be_used_is_refused_before_anything_starts(
    place: Place,
    capsys: pytest.CaptureFixture[str],
    own: S3Server,
    command: str,
    wrong: Callable[[Place, S3Server], list[str]],
) -> None:
    for name, value in own.credentials.items():
        place.patch.setenv(name, value)
    place.text = place.text.replace("s3: {", f"s3: {{scheme: {own.settings.scheme}, ")
    place.patch.setattr(serve.interrupt, "end_in_order", lambda: None)
    parts = wrong(place, own)
    message = said(capsys, place.patch, command, str(place.write()))
    for part in ("'right' cannot be brought up", "or leave `s3` out", *parts):
        assert part in message


def test_a_store_that_can_be_used_is_no_mistake(place: Place, own: S3Server) -> None:
    for name, value in own.credentials.items():
        place.patch.setenv(name, value)
    place.change("kv-cache", own.settings.bucket)
    place.change('"store.lan:9000"', f'"{own.settings.endpoint}", scheme: {own.settings.scheme}')
    store.require(load(place.write()))


def test_the_right_file_has_no_mistake(place: Place) -> None:
    preflight.require(load(place.write()))
    place.text += HOSTS
    assert load(place.write()).hosts is not None


def test_credentials_may_come_from_elsewhere(place: Place) -> None:
    place.patch.delenv("AWS_ACCESS_KEY_ID")
    place.patch.delenv("AWS_SECRET_ACCESS_KEY")
    place.patch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/token")
    preflight.require(load(place.write()))
    place.patch.delenv("AWS_WEB_IDENTITY_TOKEN_FILE")
    (place.folder / ".aws").mkdir()
    (place.folder / ".aws" / "credentials").write_text("[team]\naws_access_key_id = x\n")
    place.patch.setenv("AWS_PROFILE", "team")
    preflight.require(load(place.write()))


def test_render_notes_what_ray_up_will_miss(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.text += HOSTS
    place.patch.setattr("cluster.ray_start.HOSTS_TOKEN", place.folder / "token")
    place.patch.setattr("sys.argv", ["handoff", "render", str(place.write())])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert not ended.value.code
    assert "cluster_name: right" in printed.out
    assert "token is not here, or empty" in printed.err
    assert "ray get-auth-token --generate" in printed.err
    assert "hosts.ssh_key: ~/.ssh/id_ed25519 is not here" in printed.err


def test_serving_without_the_token_is_refused(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.text += HOSTS
    place.patch.setattr("deployments.local.HOSTS_TOKEN", place.folder / "token")
    place.patch.setattr(serve.interrupt, "end_in_order", lambda: None)
    message = said(capsys, place.patch, "serve", str(place.write()))
    for part in ("hosts: ", str(place.folder / "token"), "is not here", "ray exec"):
        assert part in message
