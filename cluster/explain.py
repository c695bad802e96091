"""Pydantic's findings as lines a person can act on: where, what is there, what is valid."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The entry of `valid` that `word` was most likely meant to be, or None if nothing is close."""
    found = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return found[0] if found else None


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """One line for each mistake in `error`, which came from validating `root`."""
    lines = [_line(detail, root) for detail in error.errors()]
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} mistakes\n" + "\n".join(f"  {line}" for line in lines)


def _line(detail: ErrorDetails, root: type[BaseModel]) -> str:
    location = [part for part in detail["loc"] if part != "[key]"]
    where = ".".join(str(part) for part in location)
    kind = detail["type"]
    if kind == "extra_forbidden":
        return _unknown_key(where, location, root)
    if kind == "missing":
        return f"{where}: missing; this key is required"
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "literal_error":
        return f"{where}: {detail['input']!r} is not valid; valid: {detail.get('ctx', {}).get('expected')}"
    if not where:
        return message
    if kind == "string_pattern_mismatch":
        message = f"valid: text that matches {detail.get('ctx', {}).get('pattern')}"
    return f"{where}: {detail['input']!r} is not valid: {message}"


def _unknown_key(where: str, location: Sequence[int | str], root: type[BaseModel]) -> str:
    valid = list(_model_at(root, location[:-1]).model_fields)
    guess = nearest(str(location[-1]), valid)
    hint = f"did you mean {guess!r}? " if guess else ""
    return f"{where}: unknown key; {hint}valid: {', '.join(valid)}"


def _model_at(model: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel]:
    """The model that validates the mapping at `path` under `model`."""
    position: Any = model
    for part in path:
        if isinstance(position, type) and issubclass(position, BaseModel):
            position = _given(position.model_fields[str(part)].annotation)
        elif get_origin(position) is not None and issubclass(get_origin(position), Mapping):
            position = get_args(position)[1]
    return position if isinstance(position, type) and issubclass(position, BaseModel) else model


def _given(annotation: Any) -> Any:
    """What `annotation` is when it is not None: `S3 | None` becomes `S3`."""
    if get_origin(annotation) is UnionType:
        return next((option for option in get_args(annotation) if option is not NoneType), annotation)
    return annotation
