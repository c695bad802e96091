"""Keys of the data plane and of the channels, from the secret that every member of the Ray cluster holds."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from actors.errors import WorkerError

PURPOSE = b"handoff kv data plane, version 1"
CHANNEL_PURPOSE = b"handoff channels, version 1"
DEFAULT_TOKEN = Path("~/.ray/auth_token")


def data_plane_key(purpose: bytes = PURPOSE) -> bytes:
    """Return HMAC-SHA256(Ray's cluster token, purpose), 32 bytes. The token itself is used for nothing else.

    Reads the token where Ray does: ``RAY_AUTH_TOKEN``, ``RAY_AUTH_TOKEN_PATH``, ``~/.ray/auth_token``.

    Raises:
        WorkerError: there is no token, so nobody could be told from a stranger.

    """
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if not token:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or DEFAULT_TOKEN).expanduser()
        if not path.is_file():
            raise WorkerError(
                f"workers need the cluster's secret, and {path} does not exist: start Ray with "
                f"token authentication (RAY_AUTH_MODE=token)"
            )
        token = path.read_text().strip()
        if not token:
            raise WorkerError(f"workers need the cluster's secret, and {path} is empty")
    return hmac.digest(token.encode(), purpose, "sha256")
