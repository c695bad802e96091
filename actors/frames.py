"""vLLM's own msgpack frames, for requests and outputs between gateway and workers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

Frame = tuple[bytes, ...]
"""A message and the buffers (logprobs, masks) that vLLM keeps beside it."""


class _Codec(threading.local):
    """vLLM's coders are not thread-safe; each thread has its own."""

    def __init__(self) -> None:
        self.encoder = MsgpackEncoder()
        self.requests = MsgpackDecoder(EngineCoreRequest)
        self.outputs = MsgpackDecoder(EngineCoreOutputs)


_codec = _Codec()


def encode_request(request: EngineCoreRequest) -> Frame:
    """Encode an engine request."""
    return _frame(_codec.encoder.encode(request))


def decode_request(frame: Frame) -> EngineCoreRequest:
    """Decode an engine request."""
    request: EngineCoreRequest = _codec.requests.decode(frame)
    return request


def encode_outputs(outputs: EngineCoreOutputs) -> Frame:
    """Encode what an engine step produced for one client."""
    return _frame(_codec.encoder.encode(outputs))


def decode_outputs(frame: Frame) -> EngineCoreOutputs:
    """Decode what an engine step produced."""
    outputs: EngineCoreOutputs = _codec.outputs.decode(frame)
    return outputs


def _frame(buffers: Sequence[bytes | bytearray | memoryview]) -> Frame:
    return tuple(bytes(buffer) for buffer in buffers)
