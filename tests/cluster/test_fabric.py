"""A map of `handoff probe` in a cluster file: what workers are told of links, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ClusterFileError
from cluster.fabric import FabricMap, read
from cluster.file import ClusterFile, load

MAPS = Path(__file__).parents[1] / "experiments" / "maps"
FILE = """\
model: org/model
map: map.json
nodes: {fast: {role: prefill, cpus: 1}, wide: {role: decode, cpus: 1}}
"""


def row(what: str, source: str, target: str | None, p50: float, streams: int | None = None) -> dict[str, Any]:
    return {"what": what, "source": source, "target": target, "streams": streams, "p50": p50}


def written(folder: Path, *rows: dict[str, Any], **others: Any) -> Path:
    path = folder / "map.json"
    path.write_text(json.dumps({"kind": "probe", "started": "2026-01-01T00:00:00", "rows": rows, **others}))
    return path


def test_recorded_maps_are_read() -> None:
    """Of the two maps that docs/probe.md names, one has links of 1 Gbit/s."""
    free, limited = read(MAPS / "unlimited.json"), read(MAPS / "limited-1g.json")
    assert free.nodes() == limited.nodes() == {"fast-0", "wide-0"}
    trip_s, s_per_byte = limited.out_of("fast-0")["wide-0"]["tcp"]
    assert 0 < trip_s < 0.01
    assert 0.9 < 8e-9 / s_per_byte < 1.0
    assert free.out_of("fast-0")["wide-0"]["tcp"][1] < s_per_byte / 5
    assert free.made == "2026-11-22T00:26:32+00:00"


def test_the_best_number_of_streams_each_direction_and_the_bucket(tmp_path: Path) -> None:
    found = read(
        written(
            tmp_path,
            row("tcp", "fast-0", "wide-0", 4, streams=1),
            row("tcp", "fast-0", "wide-0", 9, streams=4),
            row("tcp", "wide-0", "fast-0", 2, streams=1),
            row("object store", "fast-0", "wide-0", 3),
            row("all-reduce", "fast-0", "wide-0", 7),
            row("round trip", "fast-0", "wide-0", 200),
            row("s3 put", "fast-0", None, 1),
            row("s3 get", "wide-0", None, 3),
            row("memory copy", "fast-0", None, 80),
        )
    )
    assert found.out_of("fast-0") == {
        "wide-0": {
            "tcp": (2e-4, pytest.approx(8e-9 / 9)),
            "plasma": (2e-4, pytest.approx(8e-9 / 3)),
            "s3": (2e-4, pytest.approx(8e-9 / 0.75)),
        }
    }
    assert found.out_of("wide-0") == {"fast-0": {"tcp": (0.0, pytest.approx(4e-9))}}
    assert found.out_of("other-0") == {}


def test_a_cluster_file_names_its_map_and_carries_it(tmp_path: Path) -> None:
    written(tmp_path, row("tcp", "fast-0", "wide-0", 4))
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    file = load(path)
    assert file.map == FabricMap(made="2026-01-01T00:00:00", gbit_s={"fast-0 > wide-0": {"tcp": 4}})
    assert ClusterFile.model_validate_json(file.model_dump_json()).map == file.map


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "of kind None, not a map"),
        ('{"kind": "placement"}', "of kind 'placement', not a map"),
        ('{"kind": "probe", "started": "x"}', "no links that this version can read (KeyError('rows'))"),
    ],
)
def test_what_is_no_map_is_refused_with_what_to_do(tmp_path: Path, content: str | None, told: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    if content is not None:
        (tmp_path / "map.json").write_text(content)
    with pytest.raises(ClusterFileError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: map: {tmp_path / 'map.json'} ")
    assert told in message
    assert "handoff probe FILE" in message
    assert "leave the key `map` out of the file until then" in message


def test_a_map_of_other_nodes_is_refused(tmp_path: Path) -> None:
    written(tmp_path, row("tcp", "a-0", "b-0", 4))
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    with pytest.raises(ClusterFileError, match="map: has no node of this file, only a-0, b-0"):
        load(path)
