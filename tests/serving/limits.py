"""The engine options of these tests, and the sizes that follow from them; where models are kept."""

from pathlib import Path

BLOCK = 128
CHUNK = 512
MAX_LEN = 4096
ENGINE = {
    "max_model_len": MAX_LEN,
    "max_num_batched_tokens": CHUNK,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 1 << 30,
}

MODELS = Path(__file__).parents[2] / "models"
"""Ignored by git; made once and used again."""
