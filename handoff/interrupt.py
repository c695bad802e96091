"""Ending a command in order: the first Ctrl-C or SIGTERM starts the clean-up, later ones do not break it off.

`timeout` and process managers send SIGTERM to the process and again to its group; the second one would
otherwise interrupt the clean-up that the first one began.
"""

import signal
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def end_in_order() -> None:
    """Make the first signal raise KeyboardInterrupt in the main thread, and the following ones do nothing."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
