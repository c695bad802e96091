"""The documentation's snippets are cluster files, or parts of one, that are right; no key is left out."""

import json
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from cluster.fake import FakeEngine
from cluster.file import ClusterFile, load
from handoff import nodes

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs" / "clusters.md"
_BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def snippets(path: Path) -> list[dict[str, Any]]:
    found = [yaml.safe_load(text) for text in _BLOCK.findall(path.read_text("utf-8"))]
    assert found, f"{path} has no snippet"
    return found


WHOLE = snippets(DOCS)[0]
ALL = [
    pytest.param(one, id=f"{path.name}-{i}")
    for path in (DOCS, PROJECT / "README.md", PROJECT / "docs" / "s3.md")
    for i, one in enumerate(snippets(path))
]


@pytest.mark.parametrize("part", ALL)
def test_a_snippet_is_part_of_a_right_file(part: dict[str, Any], tmp_path: Path) -> None:
    """Sections replace those of the first file; workers that a snippet leaves out have their defaults."""
    groups = {"workers": {}} if "nodes" in part else {}
    content = {**WHOLE, **groups, **part}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    if "map" in part:
        target = tmp_path / part["map"]
        target.parent.mkdir()
        nodes_of = [f"{group}-0" for group in WHOLE["nodes"]]
        row = {"what": "tcp", "source": nodes_of[0], "target": nodes_of[1], "streams": 1, "p50": 9.4}
        target.write_text(json.dumps({"kind": "probe", "started": "2026-01-01", "rows": [row]}))
    assert load(path).name == "two-groups"


def test_the_example_of_the_help_is_right(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(nodes.EXAMPLE)
    assert [node.name for node in load(path).each_node()] == ["prefill-0", "decode-0", "decode-1"]


def keys(model: type[BaseModel]) -> Iterator[str]:
    """The keys of a model and of all models within it."""
    for name, field in model.model_fields.items():
        yield name
        for inner in models(field.annotation):
            yield from keys(inner)


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (types.UnionType, Mapping) or get_args(annotation):
        for part in get_args(annotation):
            yield from models(part)


def test_every_key_is_in_a_snippet_or_named() -> None:
    text = DOCS.read_text("utf-8")
    wanted = {*keys(ClusterFile), *keys(FakeEngine)}
    assert {"tier", "shadow", "ssh_key", "burst_s", "slow_ms"} <= wanted
    assert not [key for key in sorted(wanted) if not re.search(rf"\b{key}\b", text)]
