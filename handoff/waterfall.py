"""A request's stages as bars in the terminal."""

from collections.abc import Mapping, Sequence

from rich.text import Text

BAR_WIDTH = 30
Bar = tuple[str, float, float]
"""(words, seconds at which it begins, seconds at which it ends); the word before a colon gives its colour."""

_STYLES = {"prefill": "cyan", "KV": "magenta", "decode": "green"}


def known(stages: Sequence[tuple[str, str, str]], moments: Mapping[str, float]) -> list[Bar]:
    """Return bars for the stages (words, moment it begins, moment it ends) whose moments are known."""
    return [(words, moments[a], moments[b]) for words, a, b in stages if a in moments and b in moments]


def waterfall(bars: Sequence[Bar]) -> list[Text]:
    """Return a line for each bar: when it was, and how long; before them a line of headings."""
    begin, end = min(a for _, a, _ in bars), max(b for *_, b in bars)
    scale = BAR_WIDTH / max(end - begin, 1e-9)
    heads = ("began at", "took, ms")
    lines = [Text(f"{'':<{33 + BAR_WIDTH}}{heads[0]:>8}{heads[1]:>9}", style="dim")]
    for words, a, b in bars:
        left = min(int((a - begin) * scale), BAR_WIDTH - 1)
        width = max(1, round((b - a) * scale))
        bar = " " * left + "█" * min(width, BAR_WIDTH - left)
        style = _STYLES.get(words.partition(":")[0], "yellow")
        at, took = (a - begin) * 1e3, (b - a) * 1e3
        lines.append(
            Text.assemble(f"  {words:<30} ", (f"{bar:<{BAR_WIDTH}}", style), f"{at:8.1f}{took:9.2f}")
        )
    return lines
