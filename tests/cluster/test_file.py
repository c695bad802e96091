"""The cluster file: what is accepted, and what the messages say about what is not."""

from dataclasses import asdict
from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.errors import ClusterFileError
from cluster.file import S3, ClusterFile, load
from cluster.sizes import parse, show
from kv.bucket import S3Settings

MINIMAL = """
model: some/model
nodes:
  a: {role: prefill, count: 2, memory: 2GiB, object_store: 500MB, slots: 3, labels: {zone: x}}
  b: {role: both, slots: 2, cpus: 3, model: /weights/here, engine: {max_model_len: 64}}
engine: {max_model_len: 128, seed: 1}
workers:
  decode: {count: 2, node: b-0, engine: {seed: 2}}
s3: {bucket: kv-cache, endpoint: "minio.lan:9000", scheme: http, expiry_s: 3600, size_limit: 10GiB}
"""


def read(tmp_path: Path, text: str) -> ClusterFile:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load(path)


def failure(tmp_path: Path, text: str) -> str:
    with pytest.raises(ClusterFileError) as caught:
        read(tmp_path, text)
    return str(caught.value)


def test_routing_and_objectives(tmp_path: Path) -> None:
    file = read(tmp_path, MINIMAL)
    assert (file.router.mode, file.router.shadow, file.slo.ttft_ms) == ("adaptive", False, None)
    text = (
        MINIMAL
        + "router: {mode: never, shadow: true}\nslo: {tpot_ms: 50, classes: {batch: {ttft_ms: 9000}}}\n"
    )
    file = read(tmp_path, text)
    assert (file.router.mode, file.router.shadow, file.slo.tpot_ms) == ("never", True, 50)
    assert file.slo.classes["batch"].ttft_ms == 9000
    assert "router.mode" in failure(tmp_path, MINIMAL + "router: {mode: sometimes}\n")
    assert "slo.classes.batch.ttft_ms" in failure(
        tmp_path, MINIMAL + "slo: {classes: {batch: {ttft_ms: 0}}}\n"
    )


def test_nodes_are_named_after_their_group_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = read(tmp_path, MINIMAL)
    assert [node.name for node in file.each_node()] == ["a-0", "a-1", "b-0"]
    assert file.node("a-1").spec.memory == 2 * 2**30
    assert file.node("a-1").spec.object_store == 500_000_000


def test_roles_and_the_node_itself_become_ray_resources(tmp_path: Path) -> None:
    file = read(tmp_path, MINIMAL)
    assert file.resources_of(file.node("a-0")) == {"prefill": 3, "at:a-0": 1000}
    assert file.resources_of(file.node("b-0")) == {"prefill": 2, "decode": 2, "at:b-0": 1000}


def test_the_more_specific_engine_argument_and_model_win(tmp_path: Path) -> None:
    file = read(tmp_path, MINIMAL)
    assert file.engine_for("decode", "b-0") == {"max_model_len": 64, "seed": 2}
    assert file.engine_for("prefill", "a-0") == {"max_model_len": 128, "seed": 1}
    assert (file.model_on("a-0"), file.model_on("b-0")) == ("some/model", "/weights/here")


def test_each_worker_asks_for_what_its_group_says(tmp_path: Path) -> None:
    asks = read(tmp_path, MINIMAL).asks()
    assert [(ask.name, ask.role, ask.node) for ask in asks] == [
        ("prefill-worker-0", "prefill", None),
        ("decode-worker-0", "decode", "b-0"),
        ("decode-worker-1", "decode", "b-0"),
    ]


def test_model_paths_are_relative_to_the_file_where_they_exist(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    text = "model: ./weights\nnodes: {a: {role: both}, b: {role: both, model: weights}}"
    file = read(tmp_path, text)
    assert file.model == str(tmp_path / "weights")
    assert file.model_on("b-0") == str(tmp_path / "weights")
    assert read(tmp_path, text.replace("./weights", "org/name")).model == "org/name"


def test_a_bucket_is_optional_and_given_to_the_workers_as_it_is(tmp_path: Path) -> None:
    s3 = read(tmp_path, MINIMAL).s3
    assert s3 is not None
    assert (s3.bucket, s3.expiry_s, s3.size_limit) == ("kv-cache", 3600, 10 * 2**30)
    settings = S3Settings(**s3.model_dump(exclude={"tier"}))
    assert settings.endpoint == "minio.lan:9000"
    # The same keys and defaults; and whether it is a tier, which is not the bucket's affair.
    assert S3(bucket="abc").model_dump() == {**asdict(S3Settings("abc")), "tier": False}
    assert read(tmp_path, "model: m\nnodes: {a: {role: both, cpus: 2}}").s3 is None


TLS = "\ntls: {certificate: /c.pem, key: /c.key, authority: /ca.pem}\n"


def test_certificates_are_given_to_the_workers_as_they_are(tmp_path: Path) -> None:
    tls = read(tmp_path, MINIMAL + TLS).tls
    assert tls is not None
    assert tls.model_dump() == {"certificate": "/c.pem", "key": "/c.key", "authority": "/ca.pem"}
    assert read(tmp_path, MINIMAL).tls is None


@pytest.mark.parametrize("transport", ["plasma", "nixl"])
def test_what_cannot_be_encrypted_is_not_chosen_beside_certificates(tmp_path: Path, transport: str) -> None:
    with pytest.raises(ClusterFileError, match=f"transport: {transport} cannot be encrypted.*tcp or auto"):
        read(tmp_path, f"model: m\nnodes: {{a: {{role: both}}}}\ntransport: {transport}{TLS}")


def test_a_loaded_file_cannot_be_changed(tmp_path: Path) -> None:
    file = read(tmp_path, MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        file.name = "other"


def test_the_example_is_valid() -> None:
    file = load(Path(__file__).parents[2] / "examples" / "local.yaml")
    assert [node.name for node in file.each_node()] == ["prefill-0", "decode-0"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("memory:", "memmory:"), ["nodes.a.memmory: unknown key", "did you mean 'memory'?"]),
        (("workers:\n", "workers:\n  decod: {}\n"), ["workers.decod: unknown key", "did you mean 'decode'?"]),
        (("model: some", "modle: some"), ["did you mean 'model'?", "model: missing"]),
        (("role: both", "role: bth"), ["nodes.b.role: 'bth' is not valid", "'prefill', 'decode' or 'both'"]),
        (("memory: 2GiB", "memory: 2GiBB"), ["nodes.a.memory: '2GiBB'", '"4GiB"']),
        (("object_store: 500MB", "object_store: 5MB"), ["nodes.a.object_store: '5MB'", "78643200"]),
        (("count: 2, memory", "count: 0, memory"), ["nodes.a.count: 0 is not valid"]),
        (("  b:", "  B_:"), ["nodes.B_: 'B_' is not valid"]),
        (("  b:", "  head:"), ["nodes.head", "taken"]),
        (("node: b-0", "node: b-1"), ["workers.decode.node is 'b-1'", "a-0, a-1, b-0"]),
        (("slots: 3", "resources: {at:x: 1}"), ["nodes.a.resources", "'at:x' is set by handoff or Ray"]),
        (("zone: x", "ray.io/zone: x"), ["nodes.a.labels", "'ray.io/zone' is set by handoff or Ray"]),
        (("zone: x", "zone: a/b"), ["nodes.a.labels.zone: 'a/b' is not valid"]),
        (("bucket: kv-cache", "bukket: kv-cache"), ["s3.bukket: unknown key", "did you mean 'bucket'?"]),
        (("bucket: kv-cache, ", ""), ["s3.bucket: missing"]),
        (("bucket: kv-cache", "bucket: KV"), ["s3.bucket: 'KV' is not valid"]),
        (("scheme: http", "secret_key: x"), ["s3.secret_key: unknown key"]),
        (
            ('"minio.lan:9000"', "http://minio.lan:9000"),
            ["s3.endpoint: 'http://minio.lan:9000' is not valid"],
        ),
        (("scheme: http", "scheme: ftp"), ["s3.scheme: 'ftp' is not valid", "'https' or 'http'"]),
        (("expiry_s: 3600", "expiry_s: 0"), ["s3.expiry_s: 0 is not valid"]),
        (("expiry_s: 3600", "role_arn: me"), ["s3.role_arn: 'me' is not valid", "arn:"]),
        (("role: both", "role: prefill"), ["workers.decode asks for 2 worker(s)", "no node group offers"]),
    ],
)
def test_a_mistake_is_named_with_its_place_and_the_way_out(
    tmp_path: Path, change: tuple[str, str], expected: list[str]
) -> None:
    assert change[0] in MINIMAL
    message = failure(tmp_path, MINIMAL.replace(*change))
    for part in (str(tmp_path / "cluster.yaml"), *expected):
        assert part in message


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = MINIMAL.replace("2GiB", "many").replace("role: both", "role: all")
    message = failure(tmp_path, text)
    assert "2 mistakes" in message
    assert "nodes.a.memory" in message
    assert "nodes.b.role" in message


@pytest.mark.parametrize(
    ("text", "expected"), [("- 1", "mapping"), ("a: [", "not valid YAML"), ("", "mapping")]
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in failure(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match=r"none\.yaml: cannot be read"):
        load(tmp_path / "none.yaml")


def test_sizes_are_read_in_decimal_and_binary_units() -> None:
    assert [parse(text) for text in (7, "7", "1KB", "1 KiB", "1.5GiB")] == [7, 7, 1000, 1024, 1610612736]
    assert [show(size) for size in (7, 2048, 1610612736)] == ["7 B", "2 KiB", "1.5 GiB"]


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1XB", True, 1.5, None])
def test_other_sizes_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="a size is"):
        parse(text)
