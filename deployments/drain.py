"""Ending what is being served in order: gateways take nothing new, and answer what they have taken.

Imports no vLLM, so that `handoff down` is quick.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from actors.messages import Role
from actors.overview import overview
from actors.peers import NAMESPACE
from deployments import roles as balancer

TOLD_EVERY_S = 2.0


def drain(roles: Mapping[str, Role], progress: Callable[[str], None], within_s: float) -> None:
    """Stop the gateways and the workers of the cluster that this process is connected to.

    Args:
        roles: of the workers, by name.
        progress: told how many requests are still being answered.
        within_s: after this long, what is still being answered is broken off.

    Does nothing if nothing is served.

    """
    if not any(worker.state != "absent" for worker in overview(roles)):
        return
    balancer.end()
    progress("no new requests; those that are being answered come to their end")
    ending = threading.Thread(target=end_gateways, args=(within_s,), name="serve.shutdown", daemon=True)
    ending.start()
    waited = 0.0
    while ending.is_alive() and waited < within_s:
        ending.join(min(TOLD_EVERY_S, within_s - waited))
        waited += TOLD_EVERY_S
        if ending.is_alive() and (left := _answering(roles)):
            progress(f"{left} requests are being answered still, for {within_s - waited:.0f} s at most")
    if ending.is_alive():
        progress(f"{_answering(roles)} requests are broken off after {within_s:g} s")
    for name in roles:
        with contextlib.suppress(ValueError):  # there is none of that name
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)


def _answering(roles: Mapping[str, Role]) -> int:
    """Handed-over requests are at two workers for a while; the larger role's sum is nearest to the truth."""
    states = overview(roles)
    return max(
        sum(worker.stats.requests for worker in states if worker.stats is not None and worker.role == role)
        for role in ("prefill", "decode")
    )


def end_gateways(within_s: float) -> None:
    """Stop Serve, and with it the gateways, which answer what they have taken for so long at most."""
    with contextlib.suppress(Exception):  # it does not run, or is late
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        # As serve.shutdown does, but not tried again: it ends by killing itself, which Ray would tell of.
        ray.get(controller.graceful_shutdown.options(max_task_retries=0).remote(), timeout=within_s)
