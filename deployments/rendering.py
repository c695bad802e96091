"""vLLM's renderer, which turns requests into token ids, without what costs short requests much."""

from __future__ import annotations

from typing import Any, Final

from vllm.renderers import renderer_from_config

AT_ONCE: Final = 1000
"""Characters that are tokenised in less time than handing them to another thread and back takes."""


def renderer_of(vllm_config: Any) -> Any:
    """Return the renderer of a configuration.

    vLLM tokenises in a thread, for the sake of long prompts, and asks the tokenizer for its end token with
    every request. Here short prompts are tokenised where they are, and the end token is known.
    """
    renderer: Any = renderer_from_config(vllm_config)
    aside, at_once, end = (
        renderer._tokenize_prompt_async,
        renderer._tokenize_prompt,
        renderer.get_eos_token_id(),
    )

    async def tokenize(prompt: Any, params: Any) -> Any:
        return at_once(prompt, params) if len(prompt["prompt"]) <= AT_ONCE else await aside(prompt, params)

    renderer._tokenize_prompt_async = tokenize
    renderer.get_eos_token_id = lambda: end
    return renderer
