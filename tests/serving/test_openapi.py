"""schemathesis asks the gateway what its OpenAPI document allows, and what it does not: no 500, ever.

The same cases in every run.
"""

from typing import Any

import pytest
import schemathesis
from guarded import KEYS, Guarded
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded

pytestmark = [pytest.mark.cluster]

EXAMPLES = 3
"""Of each operation, of each mode."""
MOST_TOKENS = 4
ANSWERED_WITHIN_S = 30
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_HEADERS = {"Authorization": f"Bearer {KEYS[0]}"}


def test_whatever_is_asked_is_answered(guarded: Guarded) -> None:
    document = schemathesis.openapi.from_url(f"{guarded.endpoint.url}/openapi.json", headers=_HEADERS)
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) > 15
    answers: list[int] = []
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            if mode is schemathesis.GenerationMode.NEGATIVE and not list(operation.body):
                continue

            @seeded(1)
            @settings(
                max_examples=EXAMPLES,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                answers.append(_answered(case))

            ask()
    print(
        f"{len(answers)} requests: { ({status: answers.count(status) for status in sorted(set(answers))}) }"
    )
    assert 200 in answers
    assert 400 in answers
    guarded.endpoint.settled()


def _answered(case: Any) -> int:
    """Ask; returns the status of an answer that is in order."""
    if isinstance(case.body, dict):
        for name in _LENGTHS:  # what is right is kept short
            length = case.body.get(name)
            if length is None or (isinstance(length, int) and 0 < length <= 2048):
                case.body[name] = MOST_TOKENS
    response = case.call(headers=_HEADERS, timeout=ANSWERED_WITHIN_S)
    status: int = response.status_code
    told = f"{case.as_curl_command()}\n{status}: {response.text}"
    assert status < 500, told
    assert response.headers["x-request-id"], told
    if status >= 400:
        error = response.json()["error"]
        assert error.get("code", status) == status, told  # Anthropic's errors have none
        assert error["message"], told
    return status
