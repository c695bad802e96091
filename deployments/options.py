"""Options of vLLM's OpenAI server, as the cluster file's ``gateway.options`` has them."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

from deployments.errors import StartError

WHERE = "gateway.options"

_LISTENS = "set gateway.host and gateway.port"
_TLS = "the gateway speaks HTTP; put a proxy before it that ends TLS"
_DATA_PARALLEL = "the gateway has workers, not data-parallel ranks"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("host", "port", "uds", "root_path"), _LISTENS),
    **{f"ssl_{name}": _TLS for name in ("keyfile", "certfile", "ca_certs", "cert_reqs", "ciphers")},
    "enable_ssl_refresh": _TLS,
    **dict.fromkeys(
        (
            "data_parallel_supervisor_port",
            "dp_supervisor_probe_interval_s",
            "dp_supervisor_probe_timeout_s",
            "dp_supervisor_probe_failure_threshold",
        ),
        _DATA_PARALLEL,
    ),
    "api_key": "keys do not belong into this file; set gateway.api_keys_file",
    "lora_modules": "LoRA adapters are not handed over",
    "enable_scale_out": "the gateway divides requests itself",
    "tokens_only": "the gateway divides requests itself",
    "grpc_port": "the gateway speaks HTTP",
    "middleware": "the gateway runs no code of others",
    "h11_max_incomplete_event_size": "set gateway.limits.head",
    "h11_max_header_count": "set gateway.limits.head",
    "enable_request_id_headers": "they are on",
    "enable_server_load_tracking": "it is on",
}
"""Options that would have no effect here, or an unexpected one: what to do instead."""


def server_arguments(model: str, served_name: str, options: Mapping[str, Any]) -> Namespace:
    """Return vLLM's own server arguments for the gateway.

    Raises ``StartError``, with vLLM's message, for an option that it refuses.
    """
    from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser, validate_parsed_serve_args
    from vllm.exceptions import VLLMError
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = {field.name for field in fields(FrontendArgs)}
    argv = ["--model", model, "--served-model-name", served_name]
    for name, value in options.items():
        if name in REFUSED:
            raise StartError(f"{WHERE}.{name} cannot be set: {REFUSED[name]}")
        if name not in known:
            raise StartError(f"{WHERE}.{name} is no option of vLLM's server; engines' options go in `engine`")
        argv += _arguments(name, value)
    parser = make_arg_parser(_raising(FlexibleArgumentParser))
    try:
        arguments: Namespace = parser.parse_args(argv)
        validate_parsed_serve_args(Namespace(**vars(arguments), subparser="serve"))
        _check_parsers(arguments)
    except (ValueError, TypeError, VLLMError) as error:
        raise StartError(f"vLLM refused {WHERE}: {error}") from None
    return arguments


def _check_parsers(arguments: Namespace) -> None:
    from vllm.tool_parsers import ToolParserManager

    names = ToolParserManager.list_registered()
    if arguments.tool_call_parser is not None and arguments.tool_call_parser not in names:
        raise ValueError(f"tool_call_parser is {arguments.tool_call_parser!r}; known: {', '.join(names)}")


def _arguments(name: str, value: Any) -> list[str]:
    """Return an option as the command line has it."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}={value if isinstance(value, str) else json.dumps(value)}"]


def _raising(parser: Any) -> Any:
    """Return an instance of a parser class that raises where it would end the process."""

    class Raising(parser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    return Raising()
