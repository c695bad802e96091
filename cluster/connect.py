"""Talking to a running cluster: authentication, a look at its nodes without a driver, and a driver."""

import os
import signal
import threading
from pathlib import Path
from typing import Any, Final

import ray
from ray import _raylet
from ray._private.state import GlobalState

from cluster.running import LocalCluster

NAMESPACE: Final = "handoff"
_RAY: Final[Any] = _raylet  # compiled; its type information is incomplete


def authenticate(token_path: Path) -> None:
    """Make this process use the token in `token_path` for every Ray connection from now on.

    Ray reads its mode and token once, so both are read again here. A token in RAY_AUTH_TOKEN would win over
    the file and is therefore removed from this process's environment.
    """
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_path)
    _RAY.Config.initialize("")
    _RAY.AuthenticationTokenLoader.instance().reset_cache()


def observe(address: str, token_path: Path) -> GlobalState:
    """What the control store at `address` (HOST:PORT) knows, without becoming a driver."""
    authenticate(token_path)
    state = GlobalState()
    options = _RAY.GcsClientOptions.create(
        address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
    )
    state._initialize_global_state(options)
    return state


def connect(cluster: LocalCluster, **init: Any) -> None:
    """Make this process a driver of `cluster`. See `join`."""
    join(cluster.address, cluster.token_path, **init)


def join(address: str, token_path: Path, **init: Any) -> None:
    """Make this process a driver of the cluster at `address` (HOST:PORT), in the namespace `handoff`.

    It attaches to the head node. `init` goes to `ray.init` on top of that. Calling it again is an error of
    Ray's; `ray.shutdown()` first.
    """
    authenticate(token_path)
    settings = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False, **init}
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, **settings)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray has replaced it by its own
