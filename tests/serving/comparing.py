"""What it means for an answer to equal the reference's, and prompts to compare with.

Requests that run one at a time must be equal: tokens, text, reasons, and logprobs to within `ALIKE`. Where a
batch or a cached prefix changes the shapes that the kernels compute with, sums of bfloat16 products are
rounded differently; there, and only there, a token may differ if the reference itself held both tokens for
almost equally likely: to within `TIE`, in logprob. The model's best logits lie below 8, where neighbouring
bfloat16 values are 1/32 apart; a tie is four such steps.

Where tokens are drawn, such a difference changes one draw in about a hundred. Then what was drawn before is
the same, and as likely as the reference says, to within `TIE`; and most sequences are the same to their end.
"""

import random
from collections.abc import Sequence

from asking import Answer, Choice
from undivided import Reference, Sequenced

ALIKE = 1e-3
TIE = 4 / 32

VOCAB, SPECIAL = 4096, 7


def prompt(length: int, seed: object = 0) -> list[int]:
    """A prompt that no other case has, of this many tokens."""
    drawn = random.Random(f"{length} {seed}")
    return [drawn.randrange(SPECIAL, VOCAB) for _ in range(length)]


def equal(answer: Answer, expected: Reference) -> None:
    assert answer.prompt == expected.prompt
    for choice, sequence in zip(answer.choices, expected.sequences, strict=True):
        assert choice.tokens == sequence.tokens
        assert choice.text == sequence.text
        assert choice.finish_reason == sequence.finish_reason
        assert choice.stop_reason == sequence.stop_reason
    assert answer.usage.prompt_tokens == len(expected.prompt)
    assert answer.usage.completion_tokens == sum(len(one.tokens) for one in expected.sequences)


def equal_but_for_ties(tokens: Sequence[int], expected: Sequenced) -> None:
    """The first token that differs, if any, was as good as the reference's own."""
    assert len(tokens) == len(expected.tokens)
    for at, (ours, theirs) in enumerate(zip(tokens, expected.tokens, strict=True)):
        if ours != theirs:
            likely = expected.logprobs[at]
            assert ours in likely, f"token {at} is {ours}, the reference's best are {likely}"
            gap = likely[theirs] - likely[ours]
            assert gap <= TIE, f"token {at} is {ours}, not {theirs}, which is likelier by {gap:.3f}"
            return


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
