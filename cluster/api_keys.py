"""The file of API keys that a cluster file names."""

import os
import stat
from pathlib import Path

from cluster.errors import ClusterFileError


def read(path: str | None) -> list[str]:
    """Return the keys in a file: one per line; blank lines and those that begin with # are skipped.

    Raises ClusterFileError, which never quotes a key, if the file cannot be read or holds none,
    or others than its owner can read it.
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
        raise ClusterFileError(f"{where} cannot be read on the gateway's node: {reason}") from None
    if mode & 0o077:
        raise ClusterFileError(
            f"{where} has mode {mode:04o}, so others can read the keys; chmod 600 it "
            f"(a Kubernetes secret: defaultMode: 0400)"
        )
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ClusterFileError(f"{where} holds no key; put one on each line, or leave the setting out")
    if any(not key.isascii() or len(key.split()) > 1 for key in keys):
        raise ClusterFileError(
            f"{where} holds a key with blanks or characters beyond ASCII; choose another one"
        )
    return keys
