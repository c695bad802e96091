"""What is wrong with a cluster file although each value in it is fine: parts that do not go together.

Pure but for a look at the `config.json` of models that are on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from cluster import engine_options
from cluster.errors import PlacementError
from cluster.fake import FAKE, fake_of
from cluster.model_config import config_of, kv_bytes_per_token, kv_heads_of
from cluster.names import ROLES, Role, roles_of
from cluster.placement import NodeOffer, place
from cluster.ranks import RANKS, ranks_of, require_divisible
from cluster.sizes import show

if TYPE_CHECKING:
    from cluster.file import ClusterFile, Node

_LARGEST_BLOCK: Final = 128
"""Tokens of a block where the file does not say: vLLM's largest default."""


def mistakes(file: ClusterFile) -> Iterator[str]:
    """One line for each: the field, the value, and what to do. Nothing if the file can be brought up."""
    wrong = [line for where, engine in file.engines() for line in engine_options.mistakes(where, engine)]
    yield from wrong
    yield from _heads(file)
    if not wrong:  # numbers are numbers
        yield from _kv_memory(file)
    for role, workers in file.workers.items():
        if workers.most is not None and file.router.mode in ("never", "replicas"):
            yield (
                f"workers.{role}.most is {workers.most}, but with router.mode: {file.router.mode} no role is "
                f"ever found short of workers; leave it out, or choose adaptive or always"
            )
    if not any(workers.count for _, workers in file.workers.items()):
        yield "workers: prefill.count and decode.count are both 0, so nothing could serve; give one of them 1"
        return
    try:
        place(file.asks(most=True), [_offer(file, node) for node in file.each_node()])
    except PlacementError as error:
        yield f"workers: {error}"


def nodes_at_first(file: ClusterFile) -> set[str]:
    """Names of the nodes that take the workers which are always there; of a consistent file."""
    return {
        found.node_name for found in place(file.asks(), [_offer(file, node) for node in file.each_node()])
    }


def _heads(file: ClusterFile) -> Iterator[str]:
    """Ranks share the heads of every model that is here to be looked at."""
    models = {file.model, *(group.model for group in file.nodes.values() if group.model is not None)}
    for role, workers in file.workers.items():
        if FAKE in file.engine and file.ranks(role) > 1:
            yield f"workers.{role}: {RANKS} is {file.ranks(role)}, and the fake engine has one; leave it out"
        where = f"workers.{role}.engine.{RANKS}" if RANKS in workers.engine else f"engine.{RANKS}"
        for model in sorted(models):
            if workers.count and (heads := kv_heads_of(model)) is not None:
                try:
                    require_divisible(model, heads, file.ranks(role), where)
                except ValueError as error:
                    yield str(error)


def _kv_memory(file: ClusterFile) -> Iterator[str]:
    """The KV cache of each worker holds one request of the greatest length."""
    found = dict[str, None]()
    for role in ROLES:
        for node in file.each_node():
            if role in roles_of(node.spec.role):
                found |= dict.fromkeys(_too_small(file, role, node))
    yield from found


def _too_small(file: ClusterFile, role: Role, node: Node) -> Iterator[str]:
    engine, model = file.engine_for(role, node.name), file.model_on(node.name)
    longest = engine.get("max_model_len", (config_of(model) or {}).get("max_position_embeddings"))
    if type(longest) is not int or longest < 1:
        return

    def where(option: str) -> str:
        for found, options in reversed(list(file.engines())):
            mine = found in ("engine", f"nodes.{node.group}.engine", f"workers.{role}.engine")
            if mine and option.partition(".")[0] in options:
                return f"{found}.{option}"
        return f"engine.{option}"

    size = engine.get("block_size") or _LARGEST_BLOCK
    memory, blocks = engine.get("kv_cache_memory_bytes"), engine.get("num_gpu_blocks_override")
    fake = fake_of(engine)
    per_token = kv_bytes_per_token(model, engine) if fake is None else fake.kv_bytes_per_token
    if per_token is not None:
        per_token = -(-per_token // ranks_of(engine))
    if blocks is not None:
        given, option, value = _tokens(blocks, size), "num_gpu_blocks_override", f"{blocks}"
        least = f"{-(-longest // size)}"
    elif memory is not None and per_token is not None:
        need = per_token * longest
        given, option = _tokens(memory, 1 / per_token), "kv_cache_memory_bytes"
        value, least = f"{memory} ({show(memory)})", f"{need} ({show(need)})"
    elif fake is not None and memory is None:
        given, option, value = _tokens(fake.kv_blocks, size), "fake.kv_blocks", f"{fake.kv_blocks}"
        least = f"{-(-longest // size)}"
    else:
        return
    if given is not None and given < longest:
        yield (
            f"{where(option)} is {value}, room for {given} tokens on node {node.name}, but one request may "
            f"have {longest} (max_model_len); give it at least {least}, or lower {where('max_model_len')}"
        )


def _tokens(amount: Any, each: float) -> int | None:
    return int(amount * each) if type(amount) is int and isinstance(each, int | float) else None


def _offer(file: ClusterFile, node: Node) -> NodeOffer:
    """A node as Ray will know it while nothing runs on it."""
    total: Mapping[str, float] = {
        "CPU": node.spec.cpus,
        "GPU": node.spec.gpus,
        **{name: float(amount) for name, amount in file.resources_of(node).items()},
    }
    roles = frozenset(roles_of(node.spec.role))
    return NodeOffer(node.name, node.name, "", roles, total, total, dict(node.spec.labels))
