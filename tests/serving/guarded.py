"""The gateway with keys and tight limits, on the fake engine, for tests of the API and of what it tells."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from asking import Endpoint
from collector import Collector, collector
from fake_serving import fake_serving
from test_storm import cluster_file

from experiments.children import Child

KEYS = ("sk-first-dK3", "sk-second-9Qx")
HEAD, BODY, SEQUENCES = 4096, 64 * 1024, 16
ARRIVE_S, ANSWER_S = 2, 8
FAKE = {"kv_bytes_per_token": 1024, "kv_blocks": 512, "prefill_tokens_s": 4000, "step_ms": 6}
"""2000 tokens take 12 s, so an answer of that length is late; a prompt of 1600 tokens takes 0.4 s."""


@dataclass(frozen=True)
class Guarded:
    """A running gateway, its process, and a client with a key."""

    server: Child
    endpoint: Endpoint
    keys_file: Path
    traces: Collector


@contextmanager
def guarded_serving(model: Path, folder: Path) -> Iterator[Guarded]:
    """Serve it; traces come to this process."""
    with collector() as traces:
        yield from _guarded(model, folder, traces)


def _guarded(model: Path, folder: Path, traces: Collector) -> Iterator[Guarded]:
    keys_file = folder / "keys"
    keys_file.write_text("# two teams\n" + "\n".join(KEYS) + "\n", encoding="utf-8")
    keys_file.chmod(0o600)
    data = cluster_file(model, **FAKE)
    data["gateway"] |= {
        "api_keys_file": str(keys_file),
        "otlp_endpoint": traces.url,
        "options": {"tool_call_parser": "hermes", "enable_auto_tool_choice": True},
        "limits": {
            "head": HEAD,
            "body": BODY,
            "sequences": SEQUENCES,
            "arrive_s": ARRIVE_S,
            "answer_s": ANSWER_S,
        },
    }
    # Without blanks, answers in JSON end.
    data["engine"]["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    with fake_serving(data, {"OTEL_BSP_SCHEDULE_DELAY": "200"}) as (server, url):
        yield Guarded(server, Endpoint(url, "tiny", KEYS[0]), keys_file, traces)
