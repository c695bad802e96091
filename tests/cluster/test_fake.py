"""The fake engine's options in a cluster file."""

import pytest
from pydantic import ValidationError

from cluster.fake import FakeEngine, fake_of
from cluster.file import ClusterFile

NODES = {"a": {"role": "both"}}


def read(**data: object) -> ClusterFile:
    return ClusterFile.model_validate({"model": "m", "nodes": NODES, **data})


def test_there_is_none_unless_asked_for() -> None:
    assert fake_of(read(engine={"seed": 1}).engine_for("prefill", "a-0")) is None


def test_defaults() -> None:
    assert fake_of(read(engine={"fake": None}).engine) == FakeEngine()
    assert fake_of(read().faked().engine) == FakeEngine()


def test_serving_fake_keeps_the_options_of_the_file() -> None:
    file = read(engine={"seed": 1, "fake": {"step_ms": 3}}).faked()
    assert file.engine["seed"] == 1
    assert fake_of(file.engine) == FakeEngine(step_ms=3)


def test_a_worker_groups_options_take_the_place_of_the_files() -> None:
    decode = {"engine": {"fake": {"faults": {"die_at_step": 7}}}}
    file = read(engine={"fake": {"step_ms": 3}}, workers={"decode": decode})
    assert fake_of(file.engine_for("prefill", "a-0")) == FakeEngine(step_ms=3)
    fake = fake_of(file.engine_for("decode", "a-0"))
    assert fake is not None
    assert (fake.step_ms, fake.faults.die_at_step) == (0, 7)


@pytest.mark.parametrize(
    ("where", "data"),
    [
        ("engine.fake: step_mss: unknown key; did you mean 'step_ms'", {"engine": {"fake": {"step_mss": 1}}}),
        (
            "workers.decode.engine.fake: faults.die_at_step: 0 is not valid",
            {"workers": {"decode": {"engine": {"fake": {"faults": {"die_at_step": 0}}}}}},
        ),
        (
            "nodes.a.engine.fake: kv_bytes_per_token: 24 is not valid",
            {"nodes": {"a": {"role": "both", "engine": {"fake": {"kv_bytes_per_token": 24}}}}},
        ),
    ],
)
def test_mistakes_are_named(where: str, data: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        read(**data)
    assert where in str(caught.value)
