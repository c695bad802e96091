"""One node of the head to head: a model that prefills or decodes, and the ways between two of them.

Runs in a process of its own (``main``), where it is told to be; ``kv_station.Client`` gives it commands.
The engine is transformers' own, without batching: what is compared is the handover, not engines.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from experiments import head_users, head_ways
from experiments.head_ways import Sent, Tensors, Way
from experiments.kv_station import serve

START: Final = "from experiments.head_station import main; main()"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node is.

    Attributes:
        address: its IP address.
        key: of the data plane.
        ray: HOST:PORT of the Ray cluster it belongs to.
        threads: of its engine.
        device: cpu, cuda or mps.

    """

    address: str
    key: bytes
    ray: str
    threads: int
    device: str


class Node:
    """Public methods are commands."""

    def __init__(self, side: Connection, place: Place) -> None:
        import torch

        self._side, self._place = side, place
        self._ways: dict[str, Way] = {}
        self._model: Any = None
        self._cache: Any = None
        torch.set_num_threads(place.threads)
        self._join(place)

    def _join(self, place: Place) -> None:
        import ray

        ray.init(
            place.ray,
            _node_ip_address=place.address,
            log_to_driver=False,
            configure_logging=False,
            namespace="bench",
        )

    def load(self, model: str) -> None:
        """Load a model's weights."""
        import transformers

        auto: Any = transformers.AutoModelForCausalLM
        loaded = auto.from_pretrained(model, dtype="auto")
        self._model = loaded.to(self._place.device).eval()

    def open(self, way: str, peer: str) -> int:
        """Prepare a way; returns the port that the other end connects to, or 0."""
        self._ways[way] = head_ways.make(way, self._place.address, peer, self._place.key, self._side)
        return self._ways[way].port

    def alone(self, prompt: Sequence[int], tokens: int) -> Mapping[str, Any]:
        """Answer a prompt without anybody else."""
        began = time.monotonic()
        cache = self._prefill(prompt[:-1])
        filled = time.monotonic()
        first_at, done_at, ids = self._decode(cache, prompt[-1], tokens)
        return {"began": began, "filled": filled, "first_at": first_at, "done_at": done_at, "ids": ids}

    def hand_over(self, way: str, prompt: Sequence[int]) -> tuple[float, float, Sent]:
        """Prefill all but a prompt's last token and send the cache; returns when it began and was filled."""
        began = time.monotonic()
        cache = self._prefill(prompt[:-1])
        filled = time.monotonic()
        return began, filled, self._ways[way].send(_tensors(cache))

    def take_over(self, way: str, last: int, tokens: int) -> Mapping[str, Any]:
        """Take a cache, and answer from it."""
        got = self._ways[way].receive(self._place.device)
        first_at, done_at, ids = self._decode(_cache_of(got.tensors, self._model), last, tokens)
        return {
            "at": got.at,
            "decode_s": got.decode_s,
            "to_device_s": got.to_device_s,
            "first_at": first_at,
            "done_at": done_at,
            "ids": ids,
        }

    def encode(self, name: str, prompt: Sequence[int]) -> Mapping[str, Any]:
        """Encode and decode a prompt's cache once, in this process."""
        if self._cache is None:
            self._cache = head_ways.to_host(_tensors(self._prefill(prompt)))[0]
        return head_ways.encoded(name, self._cache)

    def users(self, asked: head_users.Asked) -> float:
        """Move the KV of many users at once: one end of it; see ``head_users``."""
        return head_users.one_end(asked, self._side, self._place.address, self._place.key)

    def _prefill(self, prompt: Sequence[int]) -> Any:
        import torch

        ids = torch.tensor([list(prompt)], device=self._place.device)
        with torch.inference_mode():
            cache = self._model(ids, use_cache=True, logits_to_keep=1).past_key_values
        self._synchronize()
        return cache

    def _decode(self, cache: Any, last: int, tokens: int) -> tuple[float, float, list[int]]:
        import torch

        ids: list[int] = []
        first_at = 0.0
        with torch.inference_mode():
            for _ in range(tokens):
                asked = torch.tensor([[last]], device=self._place.device)
                out = self._model(asked, past_key_values=cache, use_cache=True)
                last = int(out.logits[0, -1].argmax())
                ids.append(last)
                first_at = first_at or time.monotonic()
        return first_at, time.monotonic(), ids

    def _synchronize(self) -> None:
        import torch

        if self._place.device != "cpu":
            getattr(torch, self._place.device).synchronize()


def _tensors(cache: Any) -> Tensors:
    """Keys and values of all layers, in turn."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _cache_of(tensors: Tensors, model: Any) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer in range(len(tensors) // 2):
        cache.update(*tensors[2 * layer : 2 * layer + 2], layer)
    return cache


def main() -> None:
    """Serve commands. Arguments: two inherited sockets, the commands' and the side channel's."""
    commands, side = (Connection(int(number)) for number in sys.argv[1:3])
    serve(commands, lambda place: Node(side, place))
    os._exit(0)  # nothing here is worth waiting for
