"""What it means for an answer to equal the reference's, and prompts to compare with.

A request that runs alone, and whose first token prefill samples, must be equal: tokens, text, reasons, and
logprobs to within `ALIKE`. Where the kernels compute with other shapes than those of the reference (in a
batch, behind a cached prefix, where decode computes the last prompt token by itself), sums of bfloat16
products are rounded differently; there, and only there, a token may differ if the reference itself held both
tokens for almost equally likely: to within `TIE`, in logprob. The model's best logits lie below 8, where
neighbouring bfloat16 values are 1/32 apart; a tie is four such steps.

Where tokens are drawn, such a difference changes one draw in about a hundred. Then what was drawn before is
the same, and as likely as the reference says, to within `TIE`; and most sequences are the same to their end.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from asking import Answer, Choice
from undivided import Reference, Sequenced

ALIKE = 1e-3
TIE = 4 / 32

VOCAB, SPECIAL = 4096, 7


def prompt(length: int, seed: object = 0) -> list[int]:
    """A prompt that no other case has, of this many tokens."""
    drawn = random.Random(f"{length} {seed}")
    return [drawn.randrange(SPECIAL, VOCAB) for _ in range(length)]


def equal(answer: Answer, expected: Reference, **params: Any) -> None:
    """The answer is the reference's; but for ties where decode sampled. `params` are those of the request."""
    assert answer.prompt == expected.prompt
    for choice, sequence in zip(answer.choices, expected.sequences, strict=True):
        if answer.record["mode"] == "decode-samples" and choice.tokens != sequence.tokens:
            equal_but_for_ties(choice.tokens, sequence, **params)
            continue
        assert choice.tokens == sequence.tokens
        assert choice.text == sequence.text
        assert choice.finish_reason == sequence.finish_reason
        assert choice.stop_reason == sequence.stop_reason
    assert answer.usage.prompt_tokens == len(expected.prompt)
    assert answer.usage.completion_tokens == sum(len(choice.tokens) for choice in answer.choices)


def equal_but_for_ties(
    tokens: Sequence[int],
    expected: Sequenced,
    *,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    **_: Any,
) -> None:
    """The first token that differs, if any, was as good as the reference's own."""
    for at, (ours, theirs) in enumerate(zip(tokens, expected.tokens, strict=False)):
        if ours == theirs:
            continue
        likely, said = expected.logprobs[at], Counter(expected.tokens[:at])
        assert ours in likely, f"token {at} is {ours}, the reference's best are {likely}"
        worth = {
            token: likely[token] - presence_penalty * (said[token] > 0) - frequency_penalty * said[token]
            for token in (ours, theirs)
        }
        gap = worth[theirs] - worth[ours]
        assert abs(gap) <= TIE, f"token {at} is {ours}, not {theirs}, which is likelier by {gap:.3f}"
        return
    assert len(tokens) == len(expected.tokens)


def equal_until_a_draw(choice: Choice, expected: Sequenced, sure: int = 3) -> bool:
    """Check a sequence that was drawn with a seed; return whether it is the same to its end.

    The first tokens must be: a generator that is not where it should be shows at once.
    """
    assert choice.tokens[:sure] == expected.tokens[:sure]
    drawn = list(zip(choice.tokens, expected.tokens, strict=True))
    same = next((at for at, (ours, theirs) in enumerate(drawn) if ours != theirs), len(drawn))
    for at in range(same):
        gap = choice.logprobs[at] - expected.logprobs[at][expected.tokens[at]]
        assert abs(gap) <= TIE, f"token {at} is likelier by {gap:.3f} than in the reference"
    return same == len(drawn)
