"""Serving begins when KV gets from every prefill to every decode worker."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import place
from deployments.errors import StartError


@dataclass
class Asked:
    """A worker's handle; says what is missing, once for each time that it is asked."""

    missing: list[dict[str, str]]
    peers: list[list[str]] = field(default_factory=list)

    @property
    def unproven(self) -> Any:
        return SimpleNamespace(remote=self._answer)

    def _answer(self, peers: list[str]) -> dict[str, str]:
        self.peers.append(peers)
        return self.missing.pop(0) if len(self.missing) > 1 else self.missing[0]


def infos(*names: str) -> list[Any]:
    return [
        SimpleNamespace(name=name, role="prefill" if name.startswith("p") else "decode") for name in names
    ]


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_result", lambda answer: answer)
    monkeypatch.setattr(place, "PAIRS_EVERY_S", 0.0)


def test_what_is_missing_is_told_once_until_it_is_there() -> None:
    late, told = Asked([{"d1": "tcp (assumed)"}, {"d1": "tcp (assumed)"}, {}]), list[str]()
    place._wait_for_pairs({"p0": late}, infos("p0", "d0", "d1"), told.append)
    assert late.peers == [["d0", "d1"]] * 3
    assert told == ["waiting for a test block of KV from p0 to d1: tcp (assumed)"]


def test_a_pair_without_a_way_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "CONNECTED_WITHIN_S", 0.05)
    handles = {"p0": Asked([{}]), "p1": Asked([{"d0": "tcp broken (probe: timeout)"}])}
    with pytest.raises(StartError) as caught:
        place._wait_for_pairs(handles, infos("p0", "p1", "d0"), lambda _: None)
    for part in ("from p1 to d0: tcp broken (probe: timeout)", "firewalls", "transport"):
        assert part in str(caught.value)
    assert "p0" not in str(caught.value)
