"""Whether two nodes read the same model files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.errors import EngineStartError, ModelFilesDiffer
from actors.fingerprint import model_files, require_same
from actors.messages import WorkerInfo
from kv.chunk import KVLayout

WEIGHTS = bytes(range(256)) * 4096


def folder(path: Path, config: dict[str, int] | None = None, weights: bytes = WEIGHTS) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config or {"a": 1, "b": 2}))
    (path / "model.safetensors").write_bytes(weights)
    return path


def info(name: str, path: Path) -> WorkerInfo:
    layout = KVLayout("m", "bf16", 1, 128, 1, "x")
    return WorkerInfo(
        name, "prefill", f"node-{name}", 1, model_files(path), layout, 1, 1, ("plasma",), ("", 0)
    )


def test_copies_are_the_same_however_the_configuration_is_written(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two", {"b": 2, "a": 1})
    assert model_files(one).digest == model_files(two).digest
    require_same([info("a", one), info("b", two)])


@pytest.mark.parametrize("at", [0, len(WEIGHTS) - 1])
def test_other_weights_are_other_files_and_both_nodes_are_named(tmp_path: Path, at: int) -> None:
    weights = bytearray(WEIGHTS)
    weights[at] ^= 1
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two", weights=bytes(weights))
    with pytest.raises(ModelFilesDiffer) as caught:
        require_same([info("a", one), info("b", one), info("c", two)])
    for part in ("node-a", "node-c", str(one), str(two)):
        assert part in str(caught.value)


def test_another_configuration_or_size_is_another_model(tmp_path: Path) -> None:
    folders = [
        folder(tmp_path / "one"),
        folder(tmp_path / "two", {"a": 1, "b": 3}),
        folder(tmp_path / "three", weights=b"x"),
        folder(tmp_path / "four", weights=b""),
    ]
    assert len({model_files(path).digest for path in folders}) == 4


def test_an_index_counts(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two")
    (two / "model.safetensors.index.json").write_text("{}")
    assert model_files(one).digest != model_files(two).digest


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_says_what_is_missing(tmp_path: Path, missing: str) -> None:
    path = folder(tmp_path / "one")
    (path / missing).unlink()
    with pytest.raises(EngineStartError, match=rf"{path} has no .*{missing[-11:]}"):
        info("a", path)
    assert replace(info("a", folder(tmp_path / "two"))).node == "node-a"
