"""KV that outlives requests and workers: whole blocks in a bucket, found by what they mean.

A block's key is a hash of everything that its content depends on: the layout (model, dtype,
memory order) and all tokens up to its end, as a chain in which each key covers its parent's.
So equal prefixes have equal keys, whoever computed them, and are stored once. The hash is
BLAKE2b with 256 bits: somebody who chooses prompts cannot make two that collide.

One object holds one block, all layers: what prompts share ends at any block, and larger
objects are not read measurably faster (docs/s3.md). It begins with a header, little-endian:
magic, version, runs, bytes per run, tokens, layout digest, key, XXH3-64 of each run, XXH3-64
of the header. It detects corruption; it does not authenticate: who may write to the bucket is trusted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from kv.bucket import Bucket, Gate
from kv.chunk import KVLayout, Run, checksum, require_sizes
from kv.errors import ChunkCorrupt
from kv.s3 import scatter

logger = logging.getLogger(__name__)

BLOCKS: Final = "blocks/"
MAGIC: Final = b"HANDOFKV"
VERSION: Final = 1
FIXED: Final = struct.Struct("<8sIIQI32s32s")
KNOWN_S: Final = 60.0
"""For so long a block that was seen in the store is not looked for again before a put."""
KNOWN_KEYS: Final = 1 << 16


def layout_digest(layout: KVLayout) -> bytes:
    """Return 32 bytes that differ when two layouts do."""
    return _hash(json.dumps(dataclasses.asdict(layout), sort_keys=True).encode())


def block_keys(layout: KVLayout, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """Return the keys of the full blocks that these tokens fill, from token 0 on.

    ``salt`` is whatever else the content depends on, or what must not be shared: an adapter, the
    digests of images, a tenant, the rank where several share a layout.
    """
    parent = _hash(layout_digest(layout), salt)
    ids = np.asarray(tokens, np.dtype("<u4"))
    keys = []
    for start in range(0, len(ids) - layout.block_size + 1, layout.block_size):
        parent = _hash(parent, ids[start : start + layout.block_size].tobytes())
        keys.append(parent)
    return keys


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=32, person=b"handoff-kv").digest()


class KVTier:
    """Blocks of one layout in a bucket. Thread-safe; the bucket stays the caller's to close."""

    def __init__(self, bucket: Bucket, layout: KVLayout) -> None:
        self._bucket = bucket
        self.layout = layout
        self._digest = layout_digest(layout)
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()
        self._head = FIXED.size + 8 * layout.layers + 8
        self.block_nbytes = layout.layers * layout.block_bytes
        """Bytes of KV in one block, all layers."""

    def keys(self, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
        """See ``block_keys``."""
        return block_keys(self.layout, tokens, salt)

    def has(self, keys: Sequence[bytes], timeout_s: float) -> int:
        """Return how many of the keys, counted from the first, are stored without a gap.

        Stored now: a sweeper may delete a block before it is loaded.
        """
        deadline = time.monotonic() + timeout_s
        width = self._bucket.settings.connections
        for start in range(0, len(keys), width):
            some = keys[start : start + width]
            tasks = [partial(self._find, key) for key in some]
            found = self._bucket.read(tasks, deadline - time.monotonic(), f"search for {len(keys)} blocks")
            if not all(found):
                return start + found.index(False)
        return len(keys)

    def put(self, keys: Sequence[bytes], blocks: Sequence[Sequence[Run]], timeout_s: float) -> int:
        """Store blocks that are not stored yet, or will soon expire; return how many were written.

        Args:
            keys: one for each block.
            blocks: for each its runs, one per layer; left alone by the caller until this returns.
            timeout_s: deadline for all of them.

        Raises:
            TransferError: some may be stored and some not; none is stored in part.

        """
        for key, runs in zip(keys, blocks, strict=True):
            require_sizes(key.hex(), self._sizes(), runs)
        tasks = [
            partial(self._put, key, runs)
            for key, runs in zip(keys, blocks, strict=True)
            if not self.seen_lately(key)
        ]
        return sum(self._bucket.write(tasks, timeout_s, f"upload of {len(tasks)} blocks"))

    def load(self, keys: Sequence[bytes], into: Sequence[Sequence[Run]], timeout_s: float) -> None:
        """Fill ``into``, for each key its runs, one per layer, with what is stored under the keys.

        Raises:
            PeerLost: a block is not there, or the store cannot be reached.
            ChunkCorrupt: what is stored is not what the key promises. It is deleted, to be stored again.
            TransferTimeout: not all came within ``timeout_s``.
            After an error the content of ``into`` is undefined, and nothing writes to it any more.

        """
        for key, runs in zip(keys, into, strict=True):
            require_sizes(key.hex(), self._sizes(), runs)
        tasks = [partial(self._load, key, runs) for key, runs in zip(keys, into, strict=True)]
        self._bucket.read(tasks, timeout_s, f"download of {len(keys)} blocks")

    def name(self, key: bytes) -> str:
        """Return the name of a block's object."""
        return f"{BLOCKS}{self._digest[:8].hex()}/{key.hex()}"

    # -- one block ------------------------------------------------------------------------------------

    def _sizes(self) -> list[int]:
        return [self.layout.block_bytes] * self.layout.layers

    def _find(self, key: bytes, _: Gate) -> bool:
        return self._bucket.find(self.name(key)) is not None

    def _put(self, key: bytes, runs: Sequence[Run], gate: Gate) -> bool:
        stored = self._bucket.find(self.name(key))
        fresh = stored is not None and time.time() - stored.modified < self._bucket.settings.expiry_s / 2
        if not fresh:
            self._bucket.put(self.name(key), [self._header(key, runs), *runs], gate)
        if not gate.closed:
            self._saw(key)
        return not fresh

    def _load(self, key: bytes, into: Sequence[Run], gate: Gate) -> None:
        if gate.closed:
            return
        file = self._bucket.open(self.name(key))
        try:
            file.require_size(self._head + self.block_nbytes)
            arrived = file.into(0, self._bucket.memory(file.nbytes))
            self._verify(key, arrived)
        except ChunkCorrupt as error:
            logger.error("a stored block is deleted: %s", error)
            self._forget(key)
            self._bucket.later(partial(self._bucket.delete, self.name(key)))
            raise
        with gate.inside():
            scatter(arrived[self._head :], into)

    def _header(self, key: bytes, runs: Sequence[Run]) -> Run:
        layout = self.layout
        fixed = FIXED.pack(
            MAGIC, VERSION, layout.layers, layout.block_bytes, layout.block_size, self._digest, key
        )
        head = fixed + struct.pack(f"<{len(runs)}Q", *(checksum(run) for run in runs))
        return np.frombuffer(head + checksum(np.frombuffer(head, np.uint8)).to_bytes(8, "little"), np.uint8)

    def _verify(self, key: bytes, arrived: Run) -> None:
        """Raise ``ChunkCorrupt`` unless this is the block of that key, bit by bit."""
        name = f"block {key.hex()}"
        head = arrived[: self._head]
        found = checksum(head[:-8])
        if (promised := int.from_bytes(head[-8:].tobytes(), "little")) != found:
            raise ChunkCorrupt(name, "checksum of the header", f"{promised:016x}", f"{found:016x}")
        magic, version, _, _, _, digest, stored_key = FIXED.unpack_from(head.tobytes())
        for field, expected, seen in (
            ("magic", MAGIC, magic),
            ("version", VERSION, version),
            ("layout", self._digest.hex(), digest.hex()),
            ("key", key.hex(), stored_key.hex()),
        ):
            if seen != expected:
                raise ChunkCorrupt(name, field, expected, seen)
        checksums = struct.unpack_from(f"<{self.layout.layers}Q", head.tobytes(), FIXED.size)
        for layer, run in enumerate(np.split(arrived[self._head :], self.layout.layers)):
            if (found := checksum(run)) != checksums[layer]:
                raise ChunkCorrupt(
                    name, f"checksum of layer {layer}", f"{checksums[layer]:016x}", f"{found:016x}"
                )

    # -- what was seen in the store ---------------------------------------------------------------------

    def seen_lately(self, key: bytes) -> bool:
        """Return whether a put would take the block for stored without looking."""
        with self._lock:
            return time.monotonic() - self._known.get(key, -KNOWN_S) < KNOWN_S

    def _saw(self, key: bytes) -> None:
        with self._lock:
            self._known[key] = time.monotonic()
            self._known.move_to_end(key)
            if len(self._known) > KNOWN_KEYS:
                self._known.popitem(last=False)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._known.pop(key, None)
