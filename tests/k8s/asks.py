"""Asks for completions, one after the other, until its input ends; prints each answer as a line of JSON.

Runs in a pod, where names of the cluster resolve: python -c THIS URL MODEL
"""

import json
import sys
import threading
import time

import httpx

TOKENS = 16


def ask(http: httpx.Client, model: str, number: int) -> dict[str, object]:
    body = {"model": model, "prompt": f"request {number}: " + "words " * 200, "max_tokens": TOKENS}
    try:
        answer = http.post("/v1/completions", json=body)
        tokens = answer.json().get("usage", {}).get("completion_tokens")
        path = answer.headers.get("x-handoff-path", "")
        told = {"status": answer.status_code, "tokens": tokens, "path": path}
        return told if tokens == TOKENS else {**told, "error": answer.text[:500]}
    except httpx.HTTPError as error:
        return {"error": repr(error)}


def main() -> None:
    url, model = sys.argv[1:]
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    number = 0
    while not ended.is_set():
        # A connection of its own for each: one that is kept stays with the pod that it once went to.
        with httpx.Client(base_url=url, timeout=60) as http:
            print(json.dumps(ask(http, model, number)), flush=True)
        number += 1
        time.sleep(0.1)


if __name__ == "__main__":
    main()
