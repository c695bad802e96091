"""The data plane's key: one per cluster, and useless for anything else."""

from pathlib import Path

import pytest

from actors.errors import WorkerError
from actors.secret import CHANNEL_PURPOSE, data_plane_key


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No token anywhere: neither in the environment nor in this home directory."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def default_token(home: Path, token: str) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(token)


def test_every_source_gives_the_same_key(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> None:
    default_token(home, "secret\n")
    keys = [data_plane_key()]
    (tmp_path / "elsewhere").write_text("secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "elsewhere"))
    (home / ".ray" / "auth_token").unlink()
    keys.append(data_plane_key())
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    (tmp_path / "elsewhere").unlink()
    keys.append(data_plane_key())
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32


def test_the_environment_comes_before_the_named_file_and_that_before_the_home(
    monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path
) -> None:
    default_token(home, "of the home")
    of_home = data_plane_key()
    (tmp_path / "named").write_text("of the file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "named"))
    of_file = data_plane_key()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the environment")
    of_environment = data_plane_key()
    assert len({of_home, of_file, of_environment}) == 3
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the file")
    assert data_plane_key() == of_file


def test_the_key_does_not_contain_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 32)
    assert b"tt" not in data_plane_key()


def test_the_key_is_the_same_in_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of one cluster may have been installed at different times."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    assert data_plane_key().hex() == "cf2bd6d4c53f69329cac20a9630f0ec7207f4feca9d021d1814536143eb6983d"


def test_channels_and_data_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    assert data_plane_key(CHANNEL_PURPOSE) != data_plane_key()


def test_a_home_path_may_be_named(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    default_token(home, "secret")
    key = data_plane_key()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
    assert data_plane_key() == key


@pytest.mark.parametrize("named", [True, False])
def test_without_a_token_the_error_says_where_it_was_sought_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool
) -> None:
    missing = tmp_path / ".ray" / "auth_token"
    if named:
        missing = tmp_path / "nowhere"
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(missing))
    with pytest.raises(WorkerError) as caught:
        data_plane_key()
    for part in (str(missing), "RAY_AUTH_MODE=token"):
        assert part in str(caught.value)


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_token_is_no_secret(home: Path, content: str) -> None:
    default_token(home, content)
    with pytest.raises(WorkerError, match="empty"):
        data_plane_key()


def test_white_space_around_the_token_does_not_count(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    default_token(home, " secret \n")
    key = data_plane_key()
    monkeypatch.setenv("RAY_AUTH_TOKEN", " secret\n")
    assert data_plane_key() == key
