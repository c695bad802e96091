"""Options of vLLM's server: passed on, or refused with what to do instead."""

from typing import Any

import pytest

from deployments.errors import StartError
from deployments.options import REFUSED, server_arguments


def test_options_are_passed_on() -> None:
    options = {
        "tool_call_parser": "hermes",
        "enable_auto_tool_choice": True,
        "default_chat_template_kwargs": {"a": 1},
        "sse_keep_alive_interval": 7,
    }
    arguments = server_arguments("/a/model", "name", options)
    for name, value in options.items():
        assert getattr(arguments, name) == value
    assert (arguments.model, arguments.served_model_name) == ("/a/model", ["name"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"enable_auto_tool_choice": True}, "requires --tool-call-parser"),
        ({"tool_call_parser": "nope"}, "'nope'; known: .*hermes"),
        ({"chat_template": "/no/such.jinja"}, "doesn't exist"),
        ({"chat_template_content_format": "x"}, "invalid choice: 'x'"),
        ({"max_model_len": 5}, r"gateway\.options\.max_model_len is no option of vLLM's server"),
        ({"api_key": ["secret"]}, "api_keys_file"),
        ({"port": 1}, r"gateway\.port"),
    ],
    ids=str,
)
def test_options_that_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(StartError, match=says) as caught:
        server_arguments("/a/model", "name", options)
    assert "secret" not in str(caught.value)


def test_what_is_refused_is_an_option() -> None:
    arguments = server_arguments("/a/model", "name", {})
    assert [name for name in REFUSED if not hasattr(arguments, name)] == []
