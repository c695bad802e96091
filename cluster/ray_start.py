"""The command that starts Ray on a machine that `ray up` reaches, as a line for its shell."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cluster.launch import NODE_NAME, RAY_ENVIRONMENT

TOKEN: Final = "~/.ray/auth_token"
"""Where Ray looks for its token unless it is told otherwise; `ray up` copies it to every machine."""
HOSTS_TOKEN: Final = Path(TOKEN).expanduser()
HEAD_ADDRESS: Final = "--address=$RAY_HEAD_IP:"
"""`ray up` sets the variable on machines that it has rented."""


def start(name: str, argv: Sequence[str], env: Mapping[str, str], address: str | None = None) -> str:
    """Start the node `name`. address: the one that it shall have; None: that which Ray finds."""
    common = (
        f"--node-name={name}",
        *([] if address is None else [f"--node-ip-address={address}"]),
        "--include-log-monitor=false",  # it would outlive `ray down`
        "--disable-usage-stats",
        "--log-style=record",
    )
    words = " ".join(_word(word) for word in (*argv, *common))
    variables = {**RAY_ENVIRONMENT, **env, NODE_NAME: name}
    exports = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
    return f"export {exports}; ulimit -n 65536; ray start {words}"


def _word(word: str) -> str:
    """A word for the shell, in which a path's ~ is still the home of whoever runs it."""
    if word.startswith(HEAD_ADDRESS):
        return word
    return word if word.partition("=")[2].startswith("~/") else shlex.quote(word)
