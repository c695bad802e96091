"""Engines of several tensor-parallel ranks: how many, whether a model can be divided so, and their CPUs."""

from collections.abc import Mapping
from typing import Any, Final

RANKS: Final = "tensor_parallel_size"
"""vLLM's engine option."""


def ranks_of(engine: Mapping[str, Any]) -> int:
    """How many ranks engine options ask for; raises ValueError unless it is a positive whole number."""
    ranks = engine.get(RANKS, 1)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"{RANKS} is {ranks!r}; give a whole number, 1 or more")
    return ranks


def require_divisible(model: str, kv_heads: int, ranks: int, where: str = RANKS) -> None:
    """Raise ValueError unless ranks get equal shares of a model's key-value heads."""
    if kv_heads % ranks:
        fitting = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
        raise ValueError(
            f"{where} is {ranks}, and {model} has {kv_heads} key-value heads, which that does not divide; "
            f"choose one of {fitting}"
        )


def cpus_of_ranks(bind: str | None, ranks: int) -> str:
    """vLLM's `VLLM_CPU_OMP_THREADS_BIND` for several ranks, of a worker whose CPUs are `bind`.

    A list of CPUs is divided; where it does not suffice, or there is none, threads are not bound. What
    somebody has set up for the ranks themselves stays.
    """
    if bind is None:
        return "nobind"
    cpus = bind.split(",")
    if not all(cpu.isdecimal() for cpu in cpus):
        return bind
    share = len(cpus) // ranks
    if not share:
        return "nobind"
    return "|".join(",".join(cpus[rank * share : (rank + 1) * share]) for rank in range(ranks))
