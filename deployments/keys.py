"""API keys of the gateway's clients: from a file or the environment, never from arguments or logs."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable

from cluster.api_keys import read

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


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
