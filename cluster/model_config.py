"""What a model's `config.json` says of its KV cache."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def config_of(model: str) -> Mapping[str, Any] | None:
    """The text model's part of `config.json` in a model folder; None if it is not here, or not JSON."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    inner = config.get("text_config", config)
    return inner if isinstance(inner, dict) else None


def kv_heads_of(model: str) -> int | None:
    """Key-value heads; None if it cannot be told."""
    config = config_of(model) or {}
    heads = config.get("num_key_value_heads", config.get("num_attention_heads"))
    return heads if isinstance(heads, int) else None


def kv_bytes_per_token(model: str, engine: Mapping[str, Any]) -> int | None:
    """Bytes of KV that a token takes over all layers and ranks, at least; None if it cannot be told.

    Two vectors per layer and key-value head. Models that keep less than that for some tokens or layers
    (sliding windows, MLA, state spaces) are not judged.
    """
    config, heads = config_of(model) or {}, kv_heads_of(model)
    layers, attention = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if heads is None or not isinstance(layers, int) or not isinstance(attention, int) or attention < 1:
        return None
    mixed = any(kind != "full_attention" for kind in config.get("layer_types") or ())
    if mixed or any(config.get(key) for key in ("kv_lora_rank", "sliding_window", "layers_block_type")):
        return None
    width = config.get("head_dim") or config.get("hidden_size", 0) // attention
    dtype = engine.get("kv_cache_dtype", "auto")
    if str(dtype).startswith("fp8"):
        size = 1
    elif dtype == "auto":  # the model's; vLLM takes 16 bits for 32 unless told otherwise
        size = 4 if str(engine.get("dtype", "auto")).removeprefix("torch.") in ("float", "float32") else 2
    elif dtype in ("bfloat16", "float16"):
        size = 2
    else:
        return None
    return int(2 * layers * heads * width * size) or None


def is_path(model: str) -> bool:
    """Whether `model` can only be a folder, and no hub id."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1
