"""Which transports a worker has, by its part of the cluster file."""

from pathlib import Path

import pytest
import ray

from actors import transports
from actors.messages import WorkerSpec
from actors.transports import make_transports
from kv.tls import TlsError, TlsFiles


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(transports, "data_plane_key", lambda: b"k" * 32)


def names(**spec: object) -> list[str]:
    made = make_transports(WorkerSpec("w", "decode", "m", {}, **spec))  # type: ignore[arg-type]
    for transport in made.values():
        transport.close()
    return list(made)


def test_all_there_are_unless_one_is_named() -> None:
    assert names() == ["tcp", "plasma"]
    assert names(transport="tcp") == ["tcp"]
    assert names(transport="plasma") == ["plasma"]


def test_with_certificates_nothing_goes_unencrypted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[TlsFiles | None] = []

    class Tcp(transports.TcpTransport):
        def __init__(self, address: str, key: bytes, tls: TlsFiles | None = None) -> None:
            seen.append(tls)
            super().__init__(address, key)

    files = TlsFiles(tmp_path / "c", tmp_path / "k", tmp_path / "a")
    with pytest.raises(TlsError, match=r"tls\.certificate: .*/c is not a file"):
        names(tls=files)
    monkeypatch.setattr(transports, "TcpTransport", Tcp)
    assert names(tls=files) == ["tcp"]
    assert seen == [files]
