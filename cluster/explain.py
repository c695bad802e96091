"""Pydantic's findings as lines a person can act on: where, what is there, what is valid."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.patterns import WORDS

_UNITS = {
    "_ms": "a number of milliseconds, such as 2000",
    "gbit_s": "a number of Gbit/s, such as 10",
    "_s": "a number of seconds, such as 30",
}
_NOT_A_MAPPING = ("model_type", "model_attributes_type", "dict_type", "mapping_type")


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The entry of `valid` that `word` was most likely meant to be, or None if nothing is close."""
    found = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return found[0] if found else None


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """One line for each mistake in `error`, which came from validating `root`."""
    return listed([_line(detail, root) for detail in error.errors()])


def listed(mistakes: Sequence[str]) -> str:
    """One mistake as it is, several below each other."""
    if len(mistakes) == 1:
        return mistakes[0]
    return f"{len(mistakes)} mistakes\n" + "\n".join(f"  {mistake}" for mistake in mistakes)


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
        pattern = detail.get("ctx", {}).get("pattern", "")
        message = f"valid: {WORDS.get(pattern, f'text that matches {pattern}')}"
    elif kind in _NOT_A_MAPPING:
        valid = _model_at(root, location).model_fields if kind.startswith("model") else ()
        message = (
            f"give a mapping{f' with some of the keys {_names(valid)}' if valid else ' of names to values'}"
        )
    elif kind.startswith(("float", "int")):
        unit = next((text for end, text in _UNITS.items() if str(location[-1]).endswith(end)), None)
        message = message if unit is None else f"give {unit}"
    return f"{where}: {detail['input']!r} is not valid: {message}"


def _unknown_key(where: str, location: Sequence[int | str], root: type[BaseModel]) -> str:
    valid = list(_model_at(root, location[:-1]).model_fields)
    guess = nearest(str(location[-1]), valid)
    hint = f"did you mean {guess!r}? " if guess else ""
    return f"{where}: unknown key; {hint}valid: {_names(valid)}"


def _names(fields: Iterable[str]) -> str:
    return ", ".join(fields)


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
