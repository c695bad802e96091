"""Names of vLLM's engine options, without importing vLLM, which takes seconds."""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cluster.explain import nearest
from cluster.fake import FAKE
from cluster.ranks import RANKS

UNDIVIDED: Final = (
    *("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"),
    "data_parallel_size",
)
"""Options that must be 1."""
_SET_ELSEWHERE: Final[Mapping[str, str]] = {
    "model": "set `model` of the file, or of a node group",
    "served_model_name": "set `served_model_name` of the file",
    "kv_transfer_config": "handoff sets it; how KV moves is `transport`",
    "distributed_executor_backend": "handoff sets it",
    "host": "set gateway.host",
    "port": "set gateway.port",
    "api_key": "set gateway.api_keys_file",
}
_WHOLE: Final = (
    *("max_model_len", "max_num_batched_tokens", "max_num_seqs"),
    *("block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes"),
)


@functools.cache
def known() -> frozenset[str]:
    """What vLLM's `EngineArgs` has; nothing where vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    return frozenset(
        line.target.id
        for part in tree.body
        if isinstance(part, ast.ClassDef) and part.name == "EngineArgs"
        for line in part.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def mistakes(where: str, options: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with engine options that are found at `where`, as far as can be told from them alone."""
    for name, value in options.items():
        if name in _SET_ELSEWHERE:
            yield f"{where}.{name} cannot be set there: {_SET_ELSEWHERE[name]}"
        elif name != FAKE and known() and name not in known():
            guess = nearest(name, (*known(), FAKE))
            hint = f"did you mean {guess!r}? " if guess else ""
            yield f"{where}.{name}: vLLM has no such engine option; {hint}`vllm serve --help=all` lists them"
        elif name in UNDIVIDED and value != 1:
            yield (
                f"{where}.{name} is {value!r}: the KV of an engine that is divided so cannot be handed over; "
                f"set it to 1, and divide the model with {RANKS} or give the cluster more workers"
            )
        elif name in _WHOLE and value is not None and type(value) is not int:
            yield f"{where}.{name} is {value!r}; give a whole number{_meant(value)}"


def _meant(value: object) -> str:
    """The number that a text such as 4k or 1GiB probably stands for."""
    from cluster.sizes import parse

    text = str(value).strip()
    for candidate in (text, f"{text}iB"):
        try:
            return f" without a unit: {parse(candidate)}"
        except ValueError:
            continue
    return ""
