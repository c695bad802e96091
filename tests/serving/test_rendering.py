"""Short prompts are tokenised where they are, long ones in vLLM's thread; with the same result."""

import asyncio
from typing import Any

import pytest

from deployments import rendering
from deployments.rendering import AT_ONCE, renderer_of


class Renderer:
    """What of vLLM's renderer is used: two ways to tokenise, and the end token."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_eos_token_id(self) -> int:
        self.asked.append("end")
        return 7

    def _tokenize_prompt(self, prompt: dict[str, str], params: Any) -> list[int]:
        self.asked.append("at once")
        return [len(prompt["prompt"]), params]

    async def _tokenize_prompt_async(self, prompt: dict[str, str], params: Any) -> list[int]:
        self.asked.append("aside")
        return [len(prompt["prompt"]), params]


@pytest.mark.parametrize(("length", "way"), [(0, "at once"), (AT_ONCE, "at once"), (AT_ONCE + 1, "aside")])
def test_only_long_prompts_are_handed_over(length: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "renderer_from_config", lambda config: Renderer())
    found = renderer_of(None)
    assert asyncio.run(found._tokenize_prompt_async({"prompt": "x" * length}, 3)) == [length, 3]
    assert (found.get_eos_token_id(), found.get_eos_token_id()) == (7, 7)
    assert found.asked == ["end", way]
