"""API keys: where they come from, and what fits."""

from pathlib import Path

import pytest

from cluster.api_keys import read
from cluster.errors import ClusterFileError
from deployments.keys import ENVIRONMENT, Keys, of_gateway


def keys_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


def test_one_key_on_each_line(tmp_path: Path) -> None:
    assert read(keys_file(tmp_path, "# of team a\nfirst\n\n  second \n", 0o400)) == ["first", "second"]
    assert read(None) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_what_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ClusterFileError, match=rf"mode {mode:04o}.*chmod 600") as caught:
        read(keys_file(tmp_path, "secret-key", mode))
    assert "secret-key" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"), [("", "no key"), ("# none\n", "no key"), ("a b\n", "blanks"), ("schlüssel\n", "ASCII")]
)
def test_files_that_hold_no_good_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ClusterFileError, match=says):
        read(keys_file(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ClusterFileError, match=r"gateway\.api_keys_file .*nothing.* cannot be read.*No such file"
    ):
        read(str(tmp_path / "nothing"))


def test_the_environments_key_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "named")
    assert of_gateway(None).fit(b"Bearer named")
    assert len(of_gateway(None)) == 0


@pytest.mark.parametrize(
    ("header", "fits"),
    [
        *((b"Bearer one", True), (b"bearer two", True), (b"Bearer  one ", True), (b"Bearer three", False)),
        *((b"one", False), (b"Basic one", False), (b"Bearer ", False), (b"Bearer \xff", False), (b"", False)),
    ],
)
def test_headers(header: bytes, fits: bool) -> None:
    assert Keys(["one", "two"]).fit(header) is fits
