"""The one place that changes workers' roles and their number: a small actor beside Ray's head, without CPUs.

It looks at the workers every second and decides (``deployments/balance.py``, ``deployments/pools.py``).
Gateways learn a role from the worker itself, and which workers there are from the actor. Ray starts it again
if it dies: it goes on from the workers and roles that it finds. Imports no vLLM.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ray

from actors.messages import Burden, Role, WorkerInfo
from actors.peers import NAMESPACE
from cluster.file import ClusterFile
from cluster.names import ROLES
from deployments.balance import Limits, Loaded, Memory, decide, occupied
from deployments.members import ACTOR, Members, Version
from deployments.place import running_workers
from deployments.pools import Grow, Shrink, resize
from deployments.worker_pools import WorkerPools

logger = logging.getLogger(__name__)

AT_HEAD: Final = "node:__internal_head__"
"""Ray's own resource of its head node."""
EVERY_S: Final = 1.0
ANSWER_S: Final = 3.0
"""A worker that has not told its load by then is not counted in this look."""
ENDED_WITHIN_S: Final = 10.0
TOLD_S: Final = 30.0
"""A worker takes a role, and measures the ways to its peers, within this time."""
PROMPTS_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class RolesSpec:
    """What the actor needs to know.

    Attributes:
        file: the cluster's.
        nodes: for each role, the nodes on which a worker may change to it.
        limits: when roles change.

    """

    file: ClusterFile
    nodes: Mapping[Role, frozenset[str]]
    limits: Limits


def begin(file: ClusterFile) -> None:
    """Have a cluster file's workers follow the load, if it says so and there is anything to change.

    An actor that was begun with the same stays; one that was begun with anything else is replaced.
    """
    spec = spec_of(file)
    if _running() != spec:
        end()
    if spec is None:
        return
    ray.remote(RoleBalancer).options(
        name=ACTOR,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={AT_HEAD: 0.001},
        max_restarts=-1,
    ).remote(spec)


def _running() -> RolesSpec | None:
    """Return what the actor that is there was begun with; None if there is none, or it does not answer."""
    try:
        handle = ray.get_actor(ACTOR, namespace=NAMESPACE)
        spec: RolesSpec = ray.get(handle.spec.remote(), timeout=ANSWER_S)
    except (ValueError, ray.exceptions.RayError):
        return None
    return spec


def end() -> None:
    """No role changes any more, and no worker comes or goes. Returns when the actor's name is free again."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # there is none, or no cluster any more
        ray.kill(ray.get_actor(ACTOR, namespace=NAMESPACE), no_restart=True)
        deadline = time.monotonic() + ENDED_WITHIN_S
        while time.monotonic() < deadline:
            ray.get_actor(ACTOR, namespace=NAMESPACE)
            time.sleep(0.05)
        logger.warning("the actor %s has not ended within %g s", ACTOR, ENDED_WITHIN_S)


def has_pools(file: ClusterFile) -> bool:
    """Whether workers are added and given up by load."""
    return len(file.asks(most=True)) > len(file.asks()) and _routed(file)


def spec_of(file: ClusterFile) -> RolesSpec | None:
    """Return what there is to balance; None if no worker could ever change, or the router asks no roles."""
    asks = file.asks()
    nodes = {
        role: frozenset(
            node.name for node in file.each_node() if file.roles.change and file.may_take(role, node.name)
        )
        for role in ROLES
    }
    has_both = {ask.role for ask in asks} == set(ROLES)
    change = has_both and len(asks) >= 3 and any(nodes.values()) and _routed(file)
    if not change and not has_pools(file):
        return None
    roles, slo = file.roles, file.slo
    prompts_s = roles.prompts_s or (slo.ttft_ms / 2e3 if slo.ttft_ms is not None else PROMPTS_S)
    tpot_s = None if slo.tpot_ms is None else slo.tpot_ms / 1e3
    limits = Limits(prompts_s, roles.occupied, roles.spare, roles.smooth_s, roles.hold_s, tpot_s)
    return RolesSpec(file, nodes, limits)


def _routed(file: ClusterFile) -> bool:
    """Whether the router asks for roles."""
    return file.router.mode in ("adaptive", "always")


class RoleBalancer:
    """The actor; ``begin`` wraps it. Its loop runs in a thread from its construction on."""

    def __init__(self, spec: RolesSpec) -> None:
        self._spec, self._memory = spec, Memory()
        self._handles: dict[str, Any] = {}
        self._known: dict[str, Burden] = {}
        """Each worker as it was when it last answered."""
        self._looked_at = time.monotonic()
        self._spare_since: Mapping[Role, float] = {}
        self._pools = WorkerPools(spec.file, self._found())
        threading.Thread(target=self._run, name="roles", daemon=True).start()

    def members(self, gateway: int, version: Version) -> Members | None:
        """See ``MemberList.asked``."""
        return self._pools.members.asked(gateway, version)

    def spec(self) -> RolesSpec:
        """Return what it was begun with."""
        return self._spec

    def waits(self) -> dict[str, str]:
        """Return what workers that come or leave wait for, by name."""
        return self._pools.waits()

    def _found(self) -> set[str]:
        return running_workers()

    def _run(self) -> None:
        while True:
            time.sleep(EVERY_S)
            try:
                self.look()
            except Exception:
                logger.exception("roles stay as they are for now")

    def look(self) -> None:
        """Ask the workers for their load; change a role, or the number of workers, if that is called for."""
        found: dict[str, Burden] = self._ask(sorted(self._pools.members.now().here), "burden", ANSWER_S)
        now = time.monotonic()
        loads = [self._loaded(name, burden, now) for name, burden in found.items()]
        self._looked_at = now
        for name in self._restarted(found):
            self._tell(name, self._known[name].role, "restart", "it was started anew", list(found))
            del found[name]  # looked at again the next time
        self._known |= found
        limits = self._spec.limits
        self._memory, change = decide(loads, self._memory, now, limits)
        if change is not None:
            self._tell(change.worker, change.to, change.reason, change.why, list(found))
            return
        if self._pools.changed_at > self._memory.changed_at:
            self._memory = replace(self._memory, changed_at=self._pools.changed_at)
        self._spare_since, resized = resize(
            loads,
            self._memory,
            self._pools.sizes(),
            self._spare_since,
            now,
            limits,
            self._spec.file.roles.idle_s,
        )
        match resized:
            case Grow(role, by, why):
                self._pools.grow(role, by, why)
            case Shrink(name, why):
                self._pools.shrink(name, why)

    def _loaded(self, name: str, burden: Burden, now: float) -> Loaded:
        before = self._known.get(name)
        prompting_s = burden.prompting_s
        if before is not None and before.pid == burden.pid:
            prompting_s -= before.prompting_s
        other: Role = "decode" if burden.role == "prefill" else "prefill"
        return Loaded(
            name,
            burden.role,
            burden.prompts_s,
            min(1.0, prompting_s / max(1e-3, now - self._looked_at)),
            occupied(burden, self._spec.limits.tpot_s),
            burden.node in self._spec.nodes[other],
        )

    def _restarted(self, found: Mapping[str, Burden]) -> list[str]:
        """Return workers that came up again in the role of the cluster file, and had another before.

        Not one without which that role would have nobody now.
        """
        roles = [burden.role for burden in found.values()]
        return [
            name
            for name, burden in found.items()
            if (before := self._known.get(name)) is not None
            and before.pid != burden.pid
            and before.role != burden.role
            and roles.count(burden.role) > 1
        ]

    def _tell(self, name: str, to: Role, reason: str, why: str, alive: Sequence[str]) -> None:
        """Have a worker take a role; prefill workers know the way to one that is to decode before it does."""
        logger.warning("%s becomes a %s worker: %s", name, to, why)
        infos: dict[str, WorkerInfo] = self._ask(alive, "start", ANSWER_S)
        if name not in infos:
            logger.warning("%s does not answer; it keeps its role for now", name)
            return
        others = [info for other, info in infos.items() if other != name]
        if to == "decode":
            senders = [info.name for info in others if info.role == "prefill"]
            ways = self._ask(senders, "connect", TOLD_S, [replace(infos[name], role=to)])
            lines = [line for found in ways.values() for line in found]
        else:
            lines = []
        told = self._ask([name], "become", TOLD_S, to, reason, others)
        for line in (*lines, *told.get(name, [])):
            logger.info(line)
        if name not in told:
            logger.warning("%s has not said within %g s that it is a %s worker", name, TOLD_S, to)

    def _ask(self, names: Sequence[str], method: str, within_s: float, *arguments: Any) -> dict[str, Any]:
        """Call a method of workers, all at once; return the answers that came in time, by worker."""
        asked: dict[str, Any] = {}
        for name in names:
            try:
                if name not in self._handles:
                    self._handles[name] = ray.get_actor(name, namespace=NAMESPACE)
                asked[name] = getattr(self._handles[name], method).remote(*arguments)
            except (ValueError, ray.exceptions.RayError) as error:
                self._handles.pop(name, None)
                logger.debug("worker %s cannot be asked: %s", name, error)
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=within_s)
        found: dict[str, Any] = {}
        for name, reference in asked.items():
            try:
                found[name] = ray.get(reference, timeout=0)
            except Exception as error:
                logger.debug("worker %s did not answer %s: %r", name, method, error)
        return found
