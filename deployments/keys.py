"""API keys of the gateway's clients: from a file or the environment, never from arguments or logs."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from deployments.errors import StartError

ENVIRONMENT = "VLLM_API_KEY"
"""One key, as vLLM's own server reads it."""


class Keys:
    """Hashes of the keys that open the gateway; none given, it is open to all."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = tuple(_hash(key.encode()) for key in keys)

    def __len__(self) -> int:
        return len(self._hashes)

    def fit(self, authorization: bytes) -> bool:
        """Return whether an ``Authorization`` header carries one of the keys; takes as long for any."""
        scheme, _, key = authorization.partition(b" ")
        given, found = _hash(key.strip()), False
        for known in self._hashes:
            found |= secrets.compare_digest(given, known)
        return found and scheme.lower() == b"bearer"


def of_gateway(path: str | None) -> Keys:
    """Return the keys of the file and of this process's environment, and take the latter out of it.

    vLLM's server would check for that one alone.
    """
    named = os.environ.pop(ENVIRONMENT, "")
    return Keys([*read(path), *([named] if named else [])])


def read(path: str | None) -> list[str]:
    """Return the keys in a file: one per line; blank lines and those that begin with # are skipped.

    Raises ``StartError``, which never quotes a key, if the file cannot be read or holds none, or others than
    its owner can read it.
    """
    if path is None:
        return []
    where = f"gateway.api_keys_file {path}"
    try:
        with Path(path).open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StartError(f"{where} cannot be read on the gateway's node: {reason}") from None
    if mode & 0o077:
        raise StartError(
            f"{where} has mode {mode:04o}, so others can read the keys; chmod 600 it "
            f"(a Kubernetes secret: defaultMode: 0400)"
        )
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise StartError(f"{where} holds no key; put one on each line, or leave the setting out")
    if any(not key.isascii() or len(key.split()) > 1 for key in keys):
        raise StartError(f"{where} holds a key with blanks or characters beyond ASCII; choose another one")
    return keys


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
