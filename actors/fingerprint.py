"""Are two nodes about to serve the same model? A digest over the files that each node reads."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from actors.errors import EngineStartError, ModelFilesDiffer
from actors.messages import ModelFiles, WorkerInfo

SAMPLES, SAMPLE_BYTES = 16, 64 << 10


def model_files(path: Path, weights_needed: bool = True) -> ModelFiles:
    """Return the digest of a model folder in Hugging Face layout.

    Covers ``config.json``, the safetensors index (or the header of a single file), and of
    every weight file its size and evenly spread samples: a second even for hundreds of GB.

    The fake engine needs no weights.

    Raises:
        EngineStartError: the folder has no configuration or no safetensors weights.

    """
    config = path / "config.json"
    weights = sorted(path.glob("*.safetensors"))
    if not config.is_file() or (weights_needed and not weights):
        missing = "config.json" if not config.is_file() else "*.safetensors"
        raise EngineStartError(
            f"model folder {path} has no {missing}; give `model` a folder in Hugging Face layout"
        )
    state = xxhash.xxh3_128()
    state.update(json.dumps(json.loads(config.read_text()), sort_keys=True).encode())
    index = path / "model.safetensors.index.json"
    if index.is_file():
        state.update(index.read_bytes())
    for file in weights:
        state.update(file.name.encode())
        _sample(state, file)
    return ModelFiles(digest=state.hexdigest(), path=str(path))


def _sample(state: xxhash.xxh3_128, file: Path) -> None:
    size = file.stat().st_size
    state.update(size.to_bytes(8, "little"))
    with file.open("rb") as handle:
        for i in range(SAMPLES):
            handle.seek(max(0, (size - SAMPLE_BYTES) * i // (SAMPLES - 1)))
            state.update(handle.read(SAMPLE_BYTES))


def require_same(workers: list[WorkerInfo]) -> None:
    """Raise ``ModelFilesDiffer`` naming both nodes if two workers read different files."""
    first = workers[0]
    for other in workers[1:]:
        if other.model_files.digest != first.model_files.digest:
            raise ModelFilesDiffer(
                f"node {first.node} and node {other.node} have different model files: "
                f"{first.model_files.path} has digest {first.model_files.digest[:12]}, "
                f"{other.model_files.path} has {other.model_files.digest[:12]}. "
                f"Copy the same model to both, or point `model` of their node groups at equal folders."
            )
