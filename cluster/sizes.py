"""Memory sizes as people write them."""

import re
from typing import Annotated, Final

from pydantic import BeforeValidator, Field

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_WRITTEN: Final = ("KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB")
_PATTERN: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")


def parse(value: object) -> int:
    """Bytes of `value`: a whole number of bytes, or a string such as "4GiB", "1.5 GiB" or "500MB".

    Raises ValueError for anything else.
    """
    hint = ""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and (match := _PATTERN.match(value)):
        unit = _UNITS.get(match[2].upper())
        if unit is not None:
            return int(float(match[1]) * unit)
        if meant := next(
            (u for u in _WRITTEN if u.upper() in (f"{match[2]}B".upper(), match[2].upper()[:3])), None
        ):
            hint = f'; did you mean "{match[1]}{meant}"?'
    raise ValueError(f'a size is a number of bytes or text such as "4GiB" or "500MB"{hint}')


def show(size: float) -> str:
    """`size` in the largest binary unit that keeps it readable: 1610612736 becomes "1.5 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size:.0f} B"


Size = Annotated[int, BeforeValidator(parse), Field(gt=0)]
