"""Serving on KubeRay: the application that a RayService builds from the cluster file in its configuration.

Serve calls `app` in a task of its own: when the RayService is applied, when its configuration changes, and
when its head has been replaced. Nobody else has to drive the cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.serve import Application

from actors.peers import NAMESPACE
from cluster.consistent import nodes_at_first
from cluster.file import ClusterFile
from cluster.nodes import wait_for_nodes
from deployments import roles
from deployments.app import gateways
from deployments.place import running_workers, start_workers, stop_workers

logger = logging.getLogger("ray.serve")

PODS_S = 1800.0
"""Images of some gigabytes are pulled first."""


def app(args: Mapping[str, Any]) -> Application:
    """Return the gateways of ``args["cluster"]``, once its workers serve. Workers that are there are kept.

    KubeRay makes a new cluster when anything changes that workers are made from (``cluster/kube.py``), so
    that those found here are the right ones; such as are left from a build that was broken off are ended.

    Raises what ``wait_for_nodes`` and ``start_workers`` raise; the RayService's status shows it.
    """
    file = ClusterFile.model_validate(args["cluster"])
    wanted = [ask.name for ask in file.asks()]
    found = running_workers()
    if not set(wanted) <= found <= {ask.name for ask in file.asks(most=True)}:
        roles.end()
        stop_workers([ray.get_actor(name, namespace=NAMESPACE) for name in sorted(found)])
        wait_for_nodes(file, logger.info, PODS_S, nodes_at_first(file))
        start_workers(file, logger.info)
    roles.begin(file)
    return gateways(file, wanted)
