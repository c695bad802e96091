"""How many ranks an engine has, what a model and a node must have for them, and their CPUs."""

import json
from pathlib import Path

import pytest

from cluster.errors import ClusterFileError
from cluster.file import ClusterFile, load
from cluster.model_config import kv_heads_of
from cluster.ranks import cpus_of_ranks, ranks_of, require_divisible

NODES = "nodes: {a: {role: both, cpus: 8, gpus: 2}}\n"


def read(tmp_path: Path, text: str, **config: object) -> ClusterFile:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    path = tmp_path / "cluster.yaml"
    path.write_text(f"model: model\n{NODES}{text}")
    return load(path)


def failure(tmp_path: Path, text: str, **config: object) -> str:
    with pytest.raises(ClusterFileError) as caught:
        read(tmp_path, text, **config)
    return str(caught.value)


def test_a_worker_asks_for_the_cpus_and_gpus_of_all_its_ranks(tmp_path: Path) -> None:
    file = read(
        tmp_path,
        "engine: {tensor_parallel_size: 2}\n"
        "workers: {prefill: {cpus: 1.5, gpus: 1}, decode: {engine: {tensor_parallel_size: 4}}}",
    )
    assert [(ask.role, ask.cpus, ask.gpus) for ask in file.asks()] == [("prefill", 3, 2), ("decode", 4, 0)]
    assert (file.ranks("prefill"), file.ranks("decode")) == (2, 4)
    assert ClusterFile.model_validate(file.model_dump()) == file


@pytest.mark.parametrize("value", [0, -1, "two", 1.5, True, None])
def test_ranks_are_a_number(tmp_path: Path, value: object) -> None:
    said = failure(
        tmp_path, f"workers: {{decode: {{engine: {{tensor_parallel_size: {json.dumps(value)}}}}}}}"
    )
    assert f"workers.decode.engine: tensor_parallel_size is {value!r}; give a whole number" in said
    with pytest.raises(ValueError, match="tensor_parallel_size is"):
        ranks_of({"tensor_parallel_size": value})


def test_nodes_do_not_decide(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "model: m\nnodes: {a: {role: both, engine: {tensor_parallel_size: 2}}}"
    )
    with pytest.raises(
        ClusterFileError, match=r"nodes\.a\.engine: tensor_parallel_size is 2, .*workers\.ROLE"
    ):
        load(tmp_path / "cluster.yaml")


def test_heads_that_ranks_cannot_share_are_named(tmp_path: Path) -> None:
    said = failure(tmp_path, "engine: {tensor_parallel_size: 3}", num_key_value_heads=4)
    assert "engine.tensor_parallel_size is 3" in said
    assert f"{tmp_path / 'model'} has 4 key-value heads" in said
    assert "choose one of 1, 2, 4" in said
    said = failure(
        tmp_path,
        "engine: {tensor_parallel_size: 2}\nworkers: {decode: {engine: {tensor_parallel_size: 8}}}",
        num_key_value_heads=4,
    )
    assert "workers.decode.engine.tensor_parallel_size is 8" in said
    read(tmp_path, "engine: {tensor_parallel_size: 4}", num_key_value_heads=4)


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"num_key_value_heads": 4, "num_attention_heads": 8}, 4),
        ({"num_attention_heads": 8}, 8),
        ({"text_config": {"num_key_value_heads": 2}}, 2),
        ({}, None),
    ],
)
def test_heads_of_a_model(tmp_path: Path, config: dict[str, object], heads: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_heads_of(str(tmp_path)) == heads


def test_a_model_that_is_not_here_says_nothing(tmp_path: Path) -> None:
    assert kv_heads_of("some/model") is None
    (tmp_path / "config.json").write_text("{")
    assert kv_heads_of(str(tmp_path)) is None


def test_what_divides_is_accepted() -> None:
    for heads in (1, 2, 4, 8):
        for ranks in (1, 2, 4, 8):
            if heads % ranks == 0:
                require_divisible("m", heads, ranks)
            else:
                with pytest.raises(ValueError, match=f"is {ranks}, and m has {heads} key-value heads"):
                    require_divisible("m", heads, ranks)


@pytest.mark.parametrize(
    ("bind", "ranks", "divided"),
    [
        ("0,1,2,3", 2, "0,1|2,3"),
        ("4,5,6", 2, "4|5"),
        ("0,1", 2, "0|1"),
        ("0", 2, "nobind"),
        ("nobind", 2, "nobind"),
        ("auto", 2, "auto"),
        ("0-3|4-7", 2, "0-3|4-7"),
        (None, 2, "nobind"),
    ],
)
def test_cpus_are_divided_among_ranks(bind: str | None, ranks: int, divided: str) -> None:
    assert cpus_of_ranks(bind, ranks) == divided
