"""`handoff doctor` on this machine, and the parts of an examiner that need no Ray."""

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import yaml
from typer.testing import CliRunner

from actors.versions import versions
from cluster.doctor import examine
from cluster.facts import Facts
from cluster.file import load
from cluster.placement import NodeOffer
from deployments import store
from experiments import doctor
from experiments.doctor import PACKAGES, Examiner, Question, answers_strangers
from handoff.cli import app
from kv.bucket import S3Settings


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.stdout


def cluster_file(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    content = {
        "name": "doctor-test",
        "model": str(model),
        "nodes": {"n": {"role": "both"}},
        "gateway": {"port": 0},
        "workers": {"prefill": {"count": 1}, "decode": {"count": 0}},
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_this_machine_as_json(tmp_path: Path, model: Path) -> None:
    _, text = run(str(cluster_file(tmp_path, model)), "--json")
    data = json.loads(text)
    assert data["examined"] == "this machine"
    (node,) = data["nodes"]
    assert node["versions"] == versions(PACKAGES)
    assert {"ray", "vllm", "torch", "nixl"} <= set(node["versions"])
    assert len(node["model"]) == 32
    levels = {one["item"]: one["level"] for one in data["findings"]}
    assert levels["model files"] == "pass"
    assert levels["version of ray"] == "pass"
    assert levels["token authentication"] == "not applicable"
    assert levels["bring-up"] in ("pass", "fail")  # of this machine's shared memory, for one


def test_what_fails_ends_with_1_and_says_what_to_do(tmp_path: Path, model: Path) -> None:
    path = cluster_file(tmp_path, model)
    (model / "model.safetensors").unlink()
    code, text = run(str(path))
    assert code == 1
    assert "fail  model files" in text
    assert "What to do\n" in text
    assert "*.safetensors" in text


def test_a_log_of_nccl_is_judged_here_too(tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    log.write_text("h:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0\n")
    code, text = run("--nccl-log", str(log))
    assert code == 1
    assert "fail  GPUDirect RDMA" in text
    assert "NET/Socket/0" in text


def test_a_cluster_that_does_not_answer_is_said() -> None:
    address = f"127.0.0.1:{closed_port()}"
    code, text = run("--address", address)
    assert code == 1
    assert f"nothing answers at {address}" in text


def test_examiners_reach_each_other_and_say_whom_they_do_not() -> None:
    here, there = Examiner(), Examiner()
    try:
        places = {
            "there": ("127.0.0.1", there.listen("there", "127.0.0.1")),
            "gone": ("127.0.0.1", closed_port()),
        }
        places["other"] = places["there"]  # somebody listens, and it is not who it should be
        found = here.reach(places)
    finally:
        there.close()
    assert found["there"] == ""
    assert f"127.0.0.1:{places['gone'][1]}" in found["gone"]
    assert "another program" in found["other"]


def test_the_clock_is_taken_from_the_shortest_round_trip() -> None:
    ours = iter([0.0, 1.0, 2.0, 2.1, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    theirs = iter([100.0, 12.05, 100.0, 100.0, 100.0])
    ahead, error = doctor._clock(lambda: next(theirs), lambda: next(ours))
    assert (ahead, error) == (pytest.approx(10.0), pytest.approx(0.05))


def test_a_model_that_is_not_there_is_an_error_or_comes_later(tmp_path: Path) -> None:
    question = Question("a", "127.0.0.1", str(tmp_path / "none"))
    assert str(tmp_path / "none") in (doctor._facts(question).model_error or "")
    later = doctor._facts(Question("a", "127.0.0.1", "nobody/has-this-model"))
    assert (later.model_later, later.model) == (True, None)


def test_a_bucket_that_cannot_be_reached_is_said() -> None:
    settings = S3Settings("none", endpoint=f"127.0.0.1:{closed_port()}", scheme="http")
    assert "s3://none/handoff at 127.0.0.1" in store.trouble(settings)


@contextlib.contextmanager
def control_store(refuses: bool) -> Iterator[str]:
    """Answers the call that is made of Ray's control store, or refuses it for lack of a token."""

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        if refuses:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return b""

    methods = {"GetClusterId": grpc.unary_unary_rpc_method_handler(answer)}
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", methods)]
        )
        port = server.add_insecure_port("127.0.0.2:0")
        server.start()
        try:
            yield f"127.0.0.2:{port}"
        finally:
            server.stop(None).wait()


def test_a_control_store_that_answers_strangers_is_told_from_one_that_refuses_them() -> None:
    with control_store(refuses=False) as address:
        assert answers_strangers(address) is True
    with control_store(refuses=True) as address:
        assert answers_strangers(address) is False
    assert answers_strangers(f"127.0.0.1:{closed_port()}", 0.5) is None


class InPlace:
    """Stands for `ray` and for an actor's handle: calls are made at once, and their results kept."""

    def __init__(self, actor: Any = None) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)

        def remote(*arguments: Any) -> Future[Any]:
            done = Future[Any]()
            try:
                done.set_result(method(*arguments))
            except Exception as error:
                done.set_exception(error)
            return done

        return SimpleNamespace(remote=remote)

    @staticmethod
    def wait(references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(references)
        assert timeout
        return references, []

    @staticmethod
    def get(reference: Future[Any], timeout: float | None = None) -> Any:
        return reference.result(timeout)


class Broken(Examiner):
    def facts(self, question: Question) -> Facts:
        raise ModuleNotFoundError(f"No module named 'vllm' on {question.node}")


def offer(name: str, number: int, *roles: Any) -> NodeOffer:
    total = {"object_store_memory": 1e9 * number}
    return NodeOffer(name, f"id-{number}", f"127.0.0.{number}", frozenset(roles), total, total, {})


def test_every_node_is_examined_and_those_that_do_not_answer_are_findings(
    tmp_path: Path, model: Path
) -> None:
    path = cluster_file(tmp_path, model)
    content = yaml.safe_load(path.read_text())
    content["nodes"]["n"]["count"] = 3
    path.write_text(yaml.safe_dump(content))
    offers = {
        one.name: one
        for one in (offer("head", 2), offer("n-0", 3, "prefill"), offer("n-1", 4, "prefill", "decode"))
    }
    examiners = {"head": Examiner(), "n-0": Examiner(), "n-1": Broken()}
    actors = {name: InPlace(examiner) for name, examiner in examiners.items()}
    try:
        with control_store(refuses=True) as address:
            found, problems = doctor._examined(InPlace(), address, load(path), offers, actors)
    finally:
        for examiner in examiners.values():
            examiner.close()
    head, first = found
    assert (head.node, head.object_store, head.model) == ("head", 2_000_000_000, None)
    assert (first.node, first.address, len(first.model or "")) == ("n-0", "127.0.0.3", 32)
    assert (head.reaches, first.reaches) == ({"n-0": ""}, {"head": ""})
    assert head.clock_s == pytest.approx(0.0, abs=5.0)
    assert (head.open, first.open) == (False, None)
    assert {(one.node, one.level) for one in problems} == {("n-1", "fail"), ("n-2", "fail")}
    assert any("No module named 'vllm' on n-1" in one.found for one in problems)
    assert {one.level for one in examine(found) if one.item == "ports"} == {"pass"}


def test_nodes_of_one_name_are_told_apart() -> None:
    twins = [offer("10.0.0.1", 1), offer("10.0.0.1", 2), offer("n", 3)]
    assert list(doctor._named(twins)) == ["10.0.0.1 (id-1)", "10.0.0.1 (id-2)", "n"]
