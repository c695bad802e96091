"""`handoff trace`: one request's way through the cluster, as a waterfall."""

import json
from typing import Annotated, Any, Final
from urllib.parse import quote

import httpx
import typer
from rich.markup import escape

from deployments.ledger import first_token_path
from handoff import console
from handoff.waterfall import Bar, known, waterfall

ANSWERED_WITHIN_S: Final = 10.0
TRIES: Final = 8
"""Replicas of a gateway share a port, and each keeps the records of its own requests."""

WORDS: Final = {
    "tokenize": "gateway: tokenise",
    "route": "gateway: route",
    "submit": "gateway: send to the worker",
    "queue": "prefill: wait for the engine",
    "prefill": "prefill: read the prompt",
    "return": "prefill: token to the gateway",
    "publish": "KV: rest is published",
    "wire": "KV: rest crosses",
    "scatter": "KV: written to decode's cache",
    "decode_queue": "decode: wait for the engine",
    "first_step": "decode: first step",
    "decode_return": "decode: token to the gateway",
    "stream": "gateway: first token leaves",
}
AFTERWARDS: Final = (
    ("KV: last chunk published", "prefill.computed", "peer.published"),
    ("KV: last chunk crosses", "peer.published", "decode.fetched"),
    ("KV: written to decode's cache", "decode.fetched", "decode.loaded"),
    ("decode: wait for the engine", "decode.loaded", "decode.scheduled"),
    ("decode: second token computed", "decode.scheduled", "decode.output"),
    ("gateway: second token leaves", "decode.output", "decode_sent"),
)
"""What goes on while the first token is streamed."""


class TraceError(Exception):
    """A request's record could not be had."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(no_args_is_help=True)(trace)


def trace(
    request_id: Annotated[str, typer.Argument(help="What the response's X-Request-Id says, or you sent.")],
    url: Annotated[str, typer.Option(help="The gateway.", envvar="HANDOFF_URL")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print the gateway's record as it is.")] = False,
    key: Annotated[
        str | None,
        typer.Option(envvar="HANDOFF_API_KEY", hidden=True, help="Set the variable; arguments can be seen."),
    ] = None,
) -> None:
    """Show where a request ran and where its time went, stage by stage, up to its first token and beyond.

    The gateway keeps its latest requests. Where it wants an API key, put one into HANDOFF_API_KEY.

    Examples:

        curl -H 'X-Request-Id: mine' localhost:8000/v1/completions ...

        handoff trace mine

        handoff trace mine --url http://gateway:8000 --json
    """
    record = fetch(url, request_id, key)
    if as_json:
        console.out.print_json(json.dumps(record))
        return
    _show(record)


def fetch(url: str, request_id: str, key: str | None) -> dict[str, Any]:
    """Return the gateway's record of a request.

    Raises TraceError if no gateway is there, it wants another key, or does not know the request.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    where = f"{url.rstrip('/')}/handoff/requests/{quote(request_id, safe='')}"
    for _ in range(TRIES):  # of a new connection each, which another replica may take
        try:
            response = httpx.get(where, headers=headers, timeout=ANSWERED_WITHIN_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TraceError(
                f"no gateway answers at {url} ({error or type(error).__name__}); give its address with --url"
            ) from error
        if response.status_code != 404:
            break
    if response.status_code == 401:
        raise TraceError(f"the gateway at {url} wants an API key; put it into HANDOFF_API_KEY")
    if response.status_code == 404:
        raise TraceError(
            f"the gateway at {url} does not know the request {request_id!r}: it keeps the latest ones only; "
            f"ids are those of X-Request-Id in requests and responses"
        )
    try:
        record: dict[str, Any] = response.raise_for_status().json()
        record["moments"], record["request_id"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        raise TraceError(
            f"what answers at {url} is no Handoff gateway ({response.status_code}); give one with --url"
        ) from None
    return record


def first_token(record: dict[str, Any]) -> list[Bar]:
    """Return a request's stages up to the departure of its first token; they add up."""
    path = first_token_path(record["moments"], record.get("mode"))
    return [(WORDS[stage], begin, end) for stage, begin, end in path]


def _show(record: dict[str, Any]) -> None:
    say, path = console.out.print, first_token(record)
    say(f"request [bold]{escape(record['request_id'])}[/]: {escape(_where(record))}")
    for fact in ("reason", "transport_reason", "failure", "error"):
        if record.get(fact):
            say(f"  {fact.replace('_', ' ')}: {record[fact]}", markup=False)
    if not path:
        say("  no stage of it is known: it has not reached an engine")
        return
    say("")
    rest = known(AFTERWARDS, record["moments"]) if record.get("mode") == "first-token" else []
    for line in waterfall([*path, *rest]):
        say(line)
    total_ms = (path[-1][2] - path[0][1]) * 1e3
    done = "time to first token" if "sent" in record["moments"] else "so far"
    say(f"\n  {done}: [bold]{total_ms:.2f} ms[/], the sum of the {len(path)} stages to its departure")


def _where(record: dict[str, Any]) -> str:
    prefill, decode = (
        f"{record.get(f'{role}_worker', '?')} on {record.get(f'{role}_node', '?')}"
        for role in ("prefill", "decode")
    )
    tokens = f"{record.get('prompt_tokens', '?')} prompt tokens"
    if "decode_worker" not in record:
        return f"{tokens}, not routed"
    if record.get("mode") == "undivided":
        return f"{tokens}, undivided on {decode}"
    moved = "" if record.get("kv_bytes") is None else f", {record['kv_bytes'] / 1e6:.1f} MB of KV"
    return f"{tokens}, {prefill} to {decode}{moved} by {record.get('transport') or 'a way not known yet'}"
