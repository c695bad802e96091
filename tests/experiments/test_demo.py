import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.launch import MARKER
from experiments.demo import Answer, documentation, gather, leftovers, longest, same


def answer(**changes: Any) -> Answer:
    values: dict[str, Any] = {
        "title": "a",
        "prompt_token_ids": (1, 2),
        "token_ids": (3, 4),
        "text": "hello",
        "ttft_ms": 5.0,
        "total_ms": 9.0,
        "record": {},
    }
    return Answer(**{**values, **changes})


UNDIVIDED = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "text": "hello"}


def test_the_same_answer_is_the_same() -> None:
    assert same(answer(), UNDIVIDED)


@pytest.mark.parametrize(
    "change", [{"prompt_token_ids": (1,)}, {"token_ids": (3, 5)}, {"token_ids": (3,)}, {"text": "hallo"}]
)
def test_any_difference_is_one(change: dict[str, Any]) -> None:
    assert not same(answer(**change), UNDIVIDED)


def test_a_streamed_completion_is_gathered() -> None:
    pieces = [
        {"choices": [{"text": "he", "token_ids": [3], "prompt_token_ids": [1, 2]}]},
        {"choices": [{"text": "llo", "token_ids": [4], "prompt_token_ids": None}]},
    ]
    assert gather(pieces) == ((1, 2), (3, 4), "hello")


def test_a_streamed_chat_is_gathered() -> None:
    pieces = [
        {"prompt_token_ids": [1, 2], "choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "he"}, "token_ids": [3]}]},
        {"choices": [{"delta": {"content": "llo"}, "token_ids": [4]}]},
        {"choices": []},
    ]
    assert gather(pieces) == ((1, 2), (3, 4), "hello")


def test_the_longest_streamed_prompt_is_shown() -> None:
    long, short = answer(title="long", prompt_token_ids=(1,) * 9), answer(title="short")
    whole = answer(title="whole", prompt_token_ids=(1,) * 99, ttft_ms=None)
    assert longest([short, long, whole]).title == "long"


def test_real_text_is_long_enough() -> None:
    assert len(documentation(("class", "with", "try"))) > 10_000
    assert len(documentation(("typesseq", "import", "formatstrings"))) > 30_000


def test_what_a_cluster_leaves_is_found(tmp_path: Path) -> None:
    others = leftovers("test:nothing", (tmp_path / "gone",), within_s=0)  # servers of other tests
    assert others.paths == ()
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, MARKER: "test:something"}
    )
    try:
        left = leftovers("test:something", (tmp_path, tmp_path / "gone"), within_s=0)
    finally:
        process.kill()
        process.wait()
    assert left
    assert left.paths == (str(tmp_path),)
    assert [text.split()[0] for text in left.processes if text not in others.processes] == [str(process.pid)]
