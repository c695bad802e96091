"""KV that outlives requests and workers: pages of whole blocks in a bucket, found by what they mean.

A page is some consecutive blocks, all layers, in one object: as many as make a few megabytes,
because smaller objects are read much slower (docs/s3.md).

A page's key is a hash of everything that its content depends on: the layout (model, dtype,
memory order) and all tokens up to its end, as a chain in which each key covers its parent's.
So equal prefixes have equal keys, whoever computed them, and are stored once. The hash is
BLAKE2b with 256 bits: somebody who chooses prompts cannot make two that collide.

An object begins with a header, little-endian: magic, version, runs, bytes per run, tokens,
layout digest, key, XXH3-64 of each run, XXH3-64 of the header. It detects corruption; it does
not authenticate: who may write to the bucket is trusted.
"""

from __future__ import annotations

import contextlib
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

from kv.bucket import Bucket, Gate, Stored
from kv.chunk import KVLayout, Run, checksum, require_sizes
from kv.errors import ChunkCorrupt, Gone, TransferError

logger = logging.getLogger(__name__)

PAGES: Final = "pages/"
MAGIC: Final = b"HANDOFKV"
VERSION: Final = 1
FIXED: Final = struct.Struct("<8sIIQI32s32s")
PAGE_BYTES: Final = 8 << 20
PAGE_TOKENS: Final = 512
"""A page is about so large, unless it would hold more tokens than this."""
KNOWN_S: Final = 60.0
"""For so long a page that was seen in the store is not looked for again before a put."""
KNOWN_KEYS: Final = 1 << 16


def layout_digest(layout: KVLayout) -> bytes:
    """Return 32 bytes that differ when two layouts do."""
    fields = dataclasses.asdict(layout)
    if layout.ranks == 1:
        del fields["ranks"]  # the field is younger than stored pages
    return _hash(json.dumps(fields, sort_keys=True).encode())


def blocks_per_page(layout: KVLayout) -> int:
    """Return how many blocks one object holds; part of what a key means."""
    large_enough = -(-PAGE_BYTES // (layout.layers * layout.block_bytes))
    return max(1, min(large_enough, PAGE_TOKENS // layout.block_size))


def page_keys(layout: KVLayout, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """Return the keys of the full pages that these tokens fill, from token 0 on.

    ``salt`` is whatever else the content depends on, or what must not be shared: an adapter, the
    digests of images, a tenant, the rank where several share a layout.
    """
    size = blocks_per_page(layout) * layout.block_size
    parent = _hash(layout_digest(layout), size.to_bytes(4, "little"), salt)
    ids = np.asarray(tokens, np.dtype("<u4"))
    keys = []
    for start in range(0, len(ids) - size + 1, size):
        parent = _hash(parent, ids[start : start + size].tobytes())
        keys.append(parent)
    return keys


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=32, person=b"handoff-kv").digest()


class KVTier:
    """Pages of one layout in a bucket. Thread-safe; the bucket stays the caller's to close."""

    def __init__(self, bucket: Bucket, layout: KVLayout) -> None:
        self._bucket, self.settings = bucket, bucket.settings
        self.layout = layout
        self._digest = layout_digest(layout)
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()
        self.page_blocks = blocks_per_page(layout)
        """Blocks in one page."""
        self.page_tokens = self.page_blocks * layout.block_size
        """Tokens in one page."""
        self.runs = layout.layers * self.page_blocks * layout.ranks
        """Runs in one page: layer by layer, block by block within a layer, rank by rank within a block."""
        self.run_nbytes = layout.block_bytes // layout.ranks
        self._head = FIXED.size + 8 * self.runs + 8
        self.page_nbytes = self.runs * self.run_nbytes
        """Bytes of KV in one page, all layers."""

    def keys(self, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
        """See ``page_keys``."""
        return page_keys(self.layout, tokens, salt)

    def has(self, keys: Sequence[bytes], timeout_s: float) -> int:
        """Return how many of the keys, counted from the first, are stored without a gap.

        Stored now: a sweeper may delete a page before it is loaded.
        """
        deadline = time.monotonic() + timeout_s
        width = self.settings.connections
        for start in range(0, len(keys), width):
            some = keys[start : start + width]
            tasks = [partial(self._find, key) for key in some]
            found = self._bucket.look(tasks, deadline - time.monotonic(), f"search for {len(keys)} pages")
            if not all(found):
                return start + found.index(False)
        return len(keys)

    def put(self, keys: Sequence[bytes], pages: Sequence[Sequence[Run]], timeout_s: float) -> int:
        """Store pages that are not stored yet, or will soon expire; return how many were written.

        Args:
            keys: one for each page.
            pages: for each its runs, as ``PagedCache.runs`` gives them for its blocks; left alone by the
                caller until this returns.
            timeout_s: deadline for all of them.

        Raises:
            TransferError: some may be stored and some not; none is stored in part.

        """
        for key, runs in zip(keys, pages, strict=True):
            require_sizes(key.hex(), self._sizes(), runs)
        tasks = [
            partial(self._put, key, runs)
            for key, runs in zip(keys, pages, strict=True)
            if not self.seen_lately(key)
        ]
        return sum(self._bucket.write(tasks, timeout_s, f"upload of {len(tasks)} pages"))

    def load(self, keys: Sequence[bytes], into: Sequence[Sequence[Run | None]], timeout_s: float) -> None:
        """Fill ``into``, for each key its runs as in ``put``, with what is stored; None skips a run.

        Raises:
            Gone: a page is not there.
            PeerLost: the store cannot be reached.
            ChunkCorrupt: what is stored is not what the key promises. It is deleted, to be stored again.
            TransferTimeout: not all came within ``timeout_s``.
            After an error the content of ``into`` is undefined, and nothing writes to it any more.

        """
        for key, runs in zip(keys, into, strict=True):
            require_sizes(key.hex(), self._sizes(), runs)
        tasks = [partial(self._load, key, runs) for key, runs in zip(keys, into, strict=True)]
        self._bucket.read(tasks, timeout_s, f"download of {len(keys)} pages")

    def name(self, key: bytes) -> str:
        """Return the name of a page's object."""
        return f"{PAGES}{self._digest[:8].hex()}/{key.hex()}"

    # -- one page -------------------------------------------------------------------------------------

    def _sizes(self) -> list[int]:
        return [self.run_nbytes] * self.runs

    def _find(self, key: bytes, _: Gate) -> bool:
        stored = self._bucket.find(self.name(key))
        if self._fresh(stored):
            self._saw(key)
        return stored is not None

    def _fresh(self, stored: Stored | None) -> bool:
        """Return whether a page is stored, and in the first half of its life."""
        return stored is not None and time.time() - stored.modified < self.settings.expiry_s / 2

    def _put(self, key: bytes, runs: Sequence[Run], gate: Gate) -> bool:
        fresh = self._fresh(self._bucket.find(self.name(key)))
        if not fresh:
            self._bucket.put(self.name(key), [self._header(key, runs), *runs], gate)
        if not gate.closed:
            self._saw(key)
        return not fresh

    def _load(self, key: bytes, into: Sequence[Run | None], gate: Gate) -> None:
        if gate.closed:
            return
        try:
            file = self._bucket.open(self.name(key))
            file.require_size(self._head + self.page_nbytes)
            arrived = file.into(0, self._bucket.memory(file.nbytes))
            checksums = self._verified_header(key, arrived[: self._head])
            with gate.inside():
                self._copy(key, checksums, arrived[self._head :], into)
        except ChunkCorrupt as error:
            logger.error("a stored page is deleted: %s", error)
            self._forget(key)
            # Before anybody is told: whoever puts it again at once must not find it there.
            with contextlib.suppress(TransferError):
                self._bucket.delete(self.name(key))
            raise
        except Gone:
            self._forget(key)  # to be stored again
            raise

    def _header(self, key: bytes, runs: Sequence[Run]) -> Run:
        fixed = FIXED.pack(MAGIC, VERSION, self.runs, self.run_nbytes, self.page_tokens, self._digest, key)
        head = fixed + struct.pack(f"<{len(runs)}Q", *(checksum(run) for run in runs))
        return np.frombuffer(head + checksum(np.frombuffer(head, np.uint8)).to_bytes(8, "little"), np.uint8)

    def _verified_header(self, key: bytes, head: Run) -> tuple[int, ...]:
        """Return the runs' checksums. Raises ``ChunkCorrupt`` unless it is the header of that key's page."""
        name = f"page {key.hex()}"
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
        return struct.unpack_from(f"<{self.runs}Q", head.tobytes(), FIXED.size)

    def _copy(self, key: bytes, checksums: Sequence[int], arrived: Run, into: Sequence[Run | None]) -> None:
        """Copy run by run what has the right checksum; each is still in the processor's cache then."""
        sources = arrived.reshape(self.runs, self.run_nbytes)
        for i, (source, promised, target) in enumerate(zip(sources, checksums, into, strict=True)):
            if (found := checksum(source)) != promised:
                name = f"page {key.hex()}"
                raise ChunkCorrupt(name, f"checksum of run {i}", f"{promised:016x}", f"{found:016x}")
            if target is not None:
                target[:] = source

    # -- what was seen in the store ---------------------------------------------------------------------

    def seen_lately(self, key: bytes) -> bool:
        """Return whether a put would take the page for stored without looking."""
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
