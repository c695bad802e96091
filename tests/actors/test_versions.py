"""Workers with other versions are refused before an engine is loaded."""

import pytest

from actors.errors import VersionsDiffer
from actors.versions import require_equal, versions


def test_equal_versions_are_fine() -> None:
    require_equal(versions(), {"a-0": versions(), "b-0": versions()})
    assert "none" not in versions().values()


def test_what_differs_is_named_with_both_values_and_the_node() -> None:
    here = {"python": "3.11", "vllm": "0.32.0", "ray": "2.60.0", "handoff": "0.1.0"}
    there = {"a-0": here, "b-0": {**here, "vllm": "0.31.1"}, "c-0": {"python": "3.12"}}
    with pytest.raises(VersionsDiffer) as caught:
        require_equal(here, there)
    for part in (
        "vllm is 0.31.1 on node b-0, and 0.32.0 here",
        "python is 3.12 on node c-0",
        "Install the same",
    ):
        assert part in str(caught.value)
    assert "a-0" not in str(caught.value)
