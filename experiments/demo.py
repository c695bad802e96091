"""The demonstration: real prompts over HTTP, answered by two nodes, compared with an undivided engine.

What is asked, what came back and what was left behind are plain values; ``handoff/demo.py`` shows them.
"""

import json
import secrets
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.local import running
from cluster.processes import marked
from cluster.state import StateDir
from experiments import undivided
from experiments.local_pair import CPUS, ENGINE, local_pair, prefill_cpus
from experiments.results import Run

KIND = "demo"
OUTPUT_TOKENS = 48
QUESTION = "What is a KV cache, and why would one hand it from one machine to another?"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of the demonstration: a text to go on with, or a chat."""

    title: str
    prompt: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    streamed: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the form that ``actors/reference.py`` takes."""
        return {"prompt": self.prompt} if self.prompt is not None else {"messages": list(self.messages)}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back over HTTP.

    Attributes:
        title: of the request.
        prompt_token_ids: the prompt as the gateway tokenised it.
        token_ids: the answer.
        text: the answer as text.
        ttft_ms: time until the first token arrived; None if the answer was not streamed.
        total_ms: time until the whole answer was there.
        record: the gateway's record of the request.

    """

    title: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    ttft_ms: float | None
    total_ms: float
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What of a cluster is still there after it was ended. Empty if all is well."""

    processes: tuple[str, ...]
    paths: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.processes or self.paths)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The demonstration's result: the run to record, the answers, and what the undivided engine said."""

    run: Run
    answers: tuple[Answer, ...]
    matches: tuple[bool, ...]
    left: Leftovers

    @property
    def good(self) -> bool:
        """Whether every answer is that of an undivided engine and nothing was left behind."""
        return all(self.matches) and not self.left


def demonstrate(model: str, progress: Progress, engine: Mapping[str, Any] = ENGINE) -> Outcome:
    """Bring two nodes up, ask, compare, take them down, and look for leftovers."""
    progress("loading vLLM")
    from deployments.local import served

    parameters = {"model": model, "engine": dict(engine), "output_tokens": OUTPUT_TOKENS}
    run = Run.begin(KIND, parameters)
    file = local_pair("demo", model, engine)
    with served(file, progress) as serving:
        cluster, plan = running(file.name), StateDir.of(file.name).plan()
        assert cluster is not None, "it has just been brought up"
        assert plan is not None, "it has just been brought up"
        asks = questions(serving.url, serving.model)
        answers = []
        for ask in asks:
            answers.append(_ask(serving.url, serving.model, ask))
            progress(f"{ask.title}: {len(answers[-1].token_ids)} tokens in {answers[-1].total_ms:.0f} ms")
    left = leftovers(plan.marker, (cluster.temp_dir, cluster.state_dir))
    progress("computing the same answers with an undivided engine: plain vLLM, nothing of ours")
    requests = [ask.as_json() for ask in asks]
    wanted = undivided.answers(model, engine, requests, OUTPUT_TOKENS, prefill_cpus(file), CPUS, progress)
    matches = tuple(same(answer, other) for answer, other in zip(answers, wanted, strict=True))
    samples = [_sample(answer, other) for answer, other in zip(answers, wanted, strict=True)]
    run = run.end(_results(answers, matches, left), samples)
    return Outcome(run, tuple(answers), matches, left)


def same(answer: Answer, other: Mapping[str, Any]) -> bool:
    """Whether both tokenised the prompt to the same ids and gave the same tokens and text."""
    return bool(
        list(answer.prompt_token_ids) == other["prompt_token_ids"]
        and list(answer.token_ids) == other["token_ids"]
        and answer.text == other["text"]
    )


def longest(answers: Sequence[Answer]) -> Answer:
    """Return the streamed answer with the longest prompt: the one worth looking at closely."""
    return max((a for a in answers if a.ttft_ms is not None), key=lambda a: len(a.prompt_token_ids))


def leftovers(marker: str, paths: Sequence[Path], within_s: float = 5.0) -> Leftovers:
    """Return the processes that carry a cluster's marker, those below this one, and the paths that exist.

    Ends as soon as there is nothing, or after ``within_s`` seconds.
    """
    deadline = time.monotonic() + within_s
    while True:
        found = {process.pid: process for process in (*marked(marker), *psutil.Process().children(True))}
        named = ((pid, _name(process)) for pid, process in found.items())
        left = Leftovers(
            tuple(f"{pid} {name}" for pid, name in named if name is not None),
            tuple(str(path) for path in paths if path.exists()),
        )
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _name(process: psutil.Process) -> str | None:
    """Return a process's command line; None if it has ended, whether or not its parent has noticed."""
    try:
        return " ".join(process.cmdline())[:200] or process.name()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None
    except psutil.AccessDenied:
        return "(of another user)"


# --- what is asked


def questions(url: str, model: str) -> list[Ask]:
    """Return the requests: short ones, and real text of about 1000 and 3000 tokens of this model."""
    thousand, three_thousand = (
        _shorten(url, model, documentation(topics), tokens)
        for topics, tokens in (
            (("class", "with", "try"), 1000),
            (("typesseq", "import", "formatstrings"), 3000),
        )
    )
    chat = ({"role": "system", "content": "You are brief."}, {"role": "user", "content": QUESTION})
    summary = ({"role": "user", "content": f"Summarise this:\n\n{three_thousand}"},)
    return [
        Ask("completion", prompt="def fibonacci(n):\n    ", streamed=False),
        Ask("streamed chat", messages=chat),
        Ask("streamed completion", prompt=thousand),
        Ask("streamed chat, long", messages=summary),
    ]


def documentation(topics: Sequence[str]) -> str:
    """Return chapters of the Python language reference, which every Python brings along."""
    from pydoc_data.topics import topics as texts

    return "\n\n".join(texts[topic] for topic in topics)


def _shorten(url: str, model: str, text: str, tokens: int) -> str:
    """Cut a text so that it has about ``tokens`` tokens, by asking the server to count them."""
    body = json.dumps({"model": model, "prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(f"{url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        count = json.load(response)["count"]
    return text[: len(text) * tokens // count] if count > tokens else text


# --- asking


def _ask(url: str, model: str, ask: Ask) -> Answer:
    from openai import OpenAI

    request_id = f"demo-{secrets.token_hex(4)}"
    options: dict[str, Any] = {
        "model": model,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "extra_headers": {"X-Request-Id": request_id},
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as client:
        sent = time.monotonic()
        if not ask.streamed:
            whole = client.completions.create(prompt=ask.prompt or "", **options)
            pieces: list[Any] = [whole]
            first = None
        elif ask.prompt is not None:
            first, pieces = _drain(client.completions.create(prompt=ask.prompt, stream=True, **options))
        else:
            messages: Any = list(ask.messages)
            first, pieces = _drain(client.chat.completions.create(messages=messages, stream=True, **options))
        ended = time.monotonic()
    with urllib.request.urlopen(f"{url}/handoff/requests/{request_id}", timeout=60) as response:
        record = json.load(response)
    prompt_ids, token_ids, text = gather([piece.model_dump() for piece in pieces])
    ttft_ms = None if first is None else (first - sent) * 1e3
    return Answer(ask.title, prompt_ids, token_ids, text, ttft_ms, (ended - sent) * 1e3, record)


def _drain(stream: Any) -> tuple[float, list[Any]]:
    """Return when the first token arrived, and all pieces."""
    first, pieces = None, []
    for piece in stream:
        if first is None and any(choice.model_extra.get("token_ids") for choice in piece.choices):
            first = time.monotonic()
        pieces.append(piece)
    assert first is not None, "the stream brought no token"
    return first, pieces


def gather(pieces: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Return (prompt token ids, token ids, text) of an answer; vLLM adds the ids to OpenAI's form."""
    prompt_ids: tuple[int, ...] = ()
    token_ids: list[int] = []
    text = ""
    for piece in pieces:
        for holder in (piece, *piece["choices"]):  # a chat has them on the piece, a completion on the choice
            prompt_ids = tuple(holder.get("prompt_token_ids") or ()) or prompt_ids
        for choice in piece["choices"]:
            token_ids.extend(choice.get("token_ids") or ())
            delta = choice.get("delta")
            text += (delta.get("content") if delta is not None else choice.get("text")) or ""
    return prompt_ids, tuple(token_ids), text


# --- what is recorded


def _results(answers: Sequence[Answer], matches: Sequence[bool], left: Leftovers) -> dict[str, Any]:
    shown = longest(answers)
    record = shown.record
    return {
        "prefill_node": record["prefill_node"],
        "decode_node": record["decode_node"],
        "transport": record["transport"],
        "kv_bytes": record["kv_bytes"],
        "output_matches_undivided": all(matches),
        "ledger_ms": record["ledger_ms"],
        "ttft_ms": shown.ttft_ms,
        "left_behind": asdict(left),
    }


def _sample(answer: Answer, other: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "title": answer.title,
        "prompt_tokens": len(answer.prompt_token_ids),
        "token_ids": list(answer.token_ids),
        "undivided_token_ids": other["token_ids"],
        "text": answer.text,
        "output_matches_undivided": same(answer, other),
        "ttft_ms": answer.ttft_ms,
        "total_ms": answer.total_ms,
        "record": dict(answer.record),
    }
