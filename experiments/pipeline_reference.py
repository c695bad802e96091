"""Held-out answers: what an undivided engine said before, in a file. Never by the system under test."""

from __future__ import annotations

import json
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from experiments.local_pair import vocabulary
from experiments.results import versions
from experiments.undivided import answers

VERSION: Final = 1
FIRST_ORDINARY_ID: Final = 16
"""Token ids below are special ones in many vocabularies."""


class HeldOutError(ValueError):
    """A file of held-out answers is not one, or is another model's; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Prompts and greedy answers as token ids.

    Attributes:
        model: the name of its folder.
        config_sha256, weights_sha256: of ``config.json``, and of all weight files' names and contents.
        made: when, by which versions, on which kind of machine.
        requests: ``{"prompt": [...], "tokens": [...]}`` each.

    """

    model: str
    config_sha256: str
    weights_sha256: str
    made: Mapping[str, str]
    requests: Sequence[Mapping[str, list[int]]]
    version: int = VERSION

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(one["prompt"]) + len(one["tokens"]) for one in self.requests)

    @property
    def sha256(self) -> str:
        """Of the prompts and answers."""
        return sha256(json.dumps([dict(one) for one in self.requests], sort_keys=True).encode()).hexdigest()


def digests(model: Path) -> tuple[str, str]:
    """Return the SHA-256 of a model's configuration and of its weights."""
    weights = sha256()
    for path in sorted(model.glob("*.safetensors")):
        weights.update(path.name.encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 24):
                weights.update(piece)
    return sha256((model / "config.json").read_bytes()).hexdigest(), weights.hexdigest()


def reference(
    path: Path,
    model: Path,
    prompts: Sequence[int],
    tokens: int,
    engine: Mapping[str, Any],
    progress: Callable[[str], None],
) -> Reference:
    """Return the file's answers; if there is none, an undivided engine, a process of its own, makes it first.

    prompts: lengths in tokens of the prompts to make. engine: its vLLM options. Raises ``HeldOutError``.
    """
    if path.exists():
        found = load(path, model)
        progress(f"held-out answers: {path}, made {found.made.get('at', 'at an unknown time')}")
        return found
    progress(f"no held-out answers in {path}: an undivided engine makes them")
    drawn, most = random.Random(0), vocabulary(str(model))
    asked = [[drawn.randrange(FIRST_ORDINARY_ID, most) for _ in range(length)] for length in prompts]
    given = answers(str(model), engine, [{"prompt": one} for one in asked], tokens, "nobind", 1, progress)
    made = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "machine": platform.machine()}
    made |= {f"version of {name}": version for name, version in versions().items()}
    requests = [
        {"prompt": one, "tokens": list(answer["token_ids"])} for one, answer in zip(asked, given, strict=True)
    ]
    found = Reference(model.name, *digests(model), made, requests)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(asdict(found)) + "\n", "utf-8")
    draft.replace(path)
    return found


def load(path: Path, model: Path) -> Reference:
    """Read a file; raises ``HeldOutError`` unless it is one, of this very model."""
    remedy = "give another --reference, or delete it: an undivided engine makes it anew"
    try:
        found = Reference(**json.loads(path.read_text("utf-8")))
        complete = found.version == VERSION and all(one["prompt"] and one["tokens"] for one in found.requests)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise HeldOutError(f"--reference: {path} holds no answers ({error}); {remedy}") from error
    if not complete or not found.requests:
        raise HeldOutError(f"--reference: {path} has another version, or no answers; {remedy}")
    config, weights = digests(model)
    for name, there, here in (
        ("config.json", found.config_sha256, config),
        ("weights", found.weights_sha256, weights),
    ):
        if there != here:
            raise HeldOutError(
                f"--reference: {path} is of a model whose {name} has SHA-256 {there[:12]}, "
                f"and that of {model} has {here[:12]}; {remedy}"
            )
    return found
