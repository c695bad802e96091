"""One bucket of an S3-compatible store, with deadlines.

`pyarrow.fs.S3FileSystem` does the talking: it finds credentials (the default chain of the AWS
SDK, with web identity, or a role to assume), uploads large objects in parts, and retries. What
it lacks is added here:

- A call of pyarrow cannot be cancelled. Calls run in threads of ours, and whoever waits for
  them stops waiting at the deadline. So that no late answer lands in memory that its owner
  has given to somebody else meanwhile, objects are read into memory of our own; it is copied
  on through a `Gate`, which the waiting side closes when it leaves.
- Errors name the bucket, the endpoint and the remedy. The store's own words are not repeated:
  they may quote access keys and signatures.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeVar

import numpy as np
from pyarrow import fs

from kv.chunk import Run
from kv.errors import ChunkCorrupt, Gone, PeerLost, StoreFull, TransferError, TransferTimeout

CONNECT_TIMEOUT_S: Final = 2.0
STALL_TIMEOUT_S: Final = 5.0
"""A connection on which nothing moves for this long is given up (and the request tried once more)."""
ATTEMPTS: Final = 2
CONFLICTS: Final = 4
"""How often a request is made again that met another one (HTTP status 409), as S3 asks for."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where KV is kept, and how much of it. Holds no secret; credentials come from the SDK's default chain.

    Attributes:
        bucket: an existing bucket.
        prefix: names of all our objects start with it; clusters that share it share their KV.
        region: the bucket's region; most servers other than AWS accept any.
        endpoint: ``host:port`` of the server; None is AWS.
        scheme: ``https`` or ``http``.
        ca_file: certificates that the server's is checked against; None: the system's.
        role_arn: a role to assume with the credentials that were found; None: none.
        external_id: condition that the role's owner may have set.
        expiry_s: objects older than this are deleted by the sweeper.
        size_limit: bytes of stored pages above which the sweeper deletes the oldest.
        timeout_s: deadline of uploads and deletions, which have none from their caller.
        connections: requests at once, for reading, again for writing, and again for looking.

    """

    bucket: str
    prefix: str = "handoff"
    region: str = "us-east-1"
    endpoint: str | None = None
    scheme: Literal["https", "http"] = "https"
    ca_file: str | None = None
    role_arn: str | None = None
    external_id: str | None = None
    expiry_s: float = 86400.0
    size_limit: int = 64 << 30
    timeout_s: float = 30.0
    connections: int = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """An object of the store.

    Attributes:
        name: without bucket and prefix.
        nbytes: its size.
        modified: when it was written, by the server's clock, in seconds since the epoch.

    """

    name: str
    nbytes: int
    modified: float


class Conflict(TransferError):
    """Another request was changing the same place. Servers on file systems mean folders as well."""


class Gate:
    """Lets threads work on a caller's memory until the caller stops waiting for them."""

    def __init__(self) -> None:
        self._inside = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def closed(self) -> bool:
        """Whether the caller has gone."""
        return self._closed

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Keep the caller from leaving. Raises ``TransferTimeout`` if it has left."""
        with self._changed:
            if self._closed:
                raise TransferTimeout("nobody waits for this any more")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more; returns when all are out."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside)


class Bucket:
    """A bucket and the threads that talk to it. Thread-safe.

    Methods that take a deadline wait; the others do one request in the calling thread, and are
    meant for tasks given to ``read`` and ``write``.

    Raises:
        TransferError: the credentials cannot be had (a role that may not be assumed, ...).

    """

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self._root = f"{settings.bucket}/{settings.prefix.strip('/')}".rstrip("/")
        self._readers = ThreadPoolExecutor(settings.connections, "kv-s3-read")
        self._writers = ThreadPoolExecutor(settings.connections, "kv-s3-write")
        self._lookers = ThreadPoolExecutor(settings.connections, "kv-s3-look")
        self._memory = threading.local()
        # In a thread, because assuming a role is a request too.
        (self._fs,) = self.read([lambda _: self._connect()], settings.timeout_s, "credentials")

    def _connect(self) -> fs.S3FileSystem:
        settings = self.settings
        optional = {
            "endpoint_override": settings.endpoint,
            "tls_ca_file_path": settings.ca_file,
            "role_arn": settings.role_arn,
            "external_id": settings.external_id,
        }
        with self._errors("credentials"):
            return fs.S3FileSystem(
                region=settings.region,
                scheme=settings.scheme,
                connect_timeout=CONNECT_TIMEOUT_S,
                request_timeout=STALL_TIMEOUT_S,
                retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
                allow_delayed_open=True,  # a small object is one request instead of three
                **{name: value for name, value in optional.items() if value is not None},
            )

    def __str__(self) -> str:
        return f"s3://{self._root} at {self.settings.endpoint or 'AWS ' + self.settings.region}"

    # -- waiting ------------------------------------------------------------------------------------

    def read(self, tasks: Sequence[Callable[[Gate], T]], timeout_s: float, what: str) -> list[T]:
        """Run tasks at once and return their results; each gets the gate to the caller's memory.

        Raises the first task's error, or ``TransferTimeout`` naming ``what``; then no task is inside the
        gate any more, nor will be.
        """
        return self._run(self._readers, tasks, timeout_s, what)

    def write(self, tasks: Sequence[Callable[[Gate], T]], timeout_s: float, what: str) -> list[T]:
        """As ``read``, in threads for uploads, which do not keep reads waiting."""
        return self._run(self._writers, tasks, timeout_s, what)

    def look(self, tasks: Sequence[Callable[[Gate], T]], timeout_s: float, what: str) -> list[T]:
        """As ``read``, in threads for small requests, which are not kept waiting by large ones."""
        return self._run(self._lookers, tasks, timeout_s, what)

    def later(self, task: Callable[[], None]) -> Future[None] | None:
        """Run a task that nobody waits for, in a thread for uploads; None after ``close``."""
        with contextlib.suppress(RuntimeError):
            return self._writers.submit(task)
        return None

    def _run(
        self, pool: ThreadPoolExecutor, tasks: Sequence[Callable[[Gate], T]], timeout_s: float, what: str
    ) -> list[T]:
        gate = Gate()
        futures: list[Future[T]] = []
        try:
            futures += [pool.submit(task, gate) for task in tasks]
        except RuntimeError:
            raise PeerLost(f"{what}: the connection to {self} has been closed") from None
        else:
            done, pending = wait(futures, timeout_s, FIRST_EXCEPTION)
            for future in done:
                if (error := future.exception()) is not None:
                    raise error
            if pending:
                raise TransferTimeout(
                    f"{what}: {self} did not answer in {timeout_s:.1f} s; "
                    f"check that the server runs, or give it more time"
                )
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            gate.close()

    def close(self) -> None:
        """Take no more calls. Those under way end by themselves, within pyarrow's timeouts."""
        self._readers.shutdown(wait=False)
        self._writers.shutdown(wait=False)
        self._lookers.shutdown(wait=False)

    # -- single requests ------------------------------------------------------------------------------

    def open(self, name: str) -> StoredFile:
        """Return an object for reading. Raises ``Gone`` if it is not there."""
        with self._errors(name):
            return StoredFile(self, name, self._fs.open_input_file(self._path(name)))

    def memory(self, nbytes: int) -> Run:
        """Return memory of the calling thread, which keeps it: valid until the thread asks again."""
        held: Run | None = getattr(self._memory, "run", None)
        if held is None or held.nbytes < nbytes:
            held = self._memory.run = np.empty(nbytes, np.uint8)
        return held[:nbytes]

    def put(self, name: str, runs: Sequence[Run], gate: Gate) -> None:
        """Store runs, one after the other, as one object; large ones in parts.

        If the caller left meanwhile, the runs may not be its any more: the object is deleted.
        """
        if gate.closed:
            return
        self._again(lambda: self._put(name, runs))
        if gate.closed:
            self.delete(name)

    def _put(self, name: str, runs: Sequence[Run]) -> None:
        with (
            self._errors(name),
            self._fs.open_output_stream(self._path(name), compression=None) as stream,
        ):
            for run in runs:
                stream.write(run)

    def _again(self, request: Callable[[], None]) -> None:
        """Make a request that may meet another one at the same place, some times at most."""
        for _ in range(CONFLICTS):
            with contextlib.suppress(Conflict):
                return request()
        return request()

    def find(self, name: str) -> Stored | None:
        """Return an object's size and age, None if it is not there."""
        try:
            with self._errors(name, missing=FileNotFoundError):
                file = self._fs.open_input_file(self._path(name))
        except FileNotFoundError:
            return None
        return StoredFile(self, name, file).stored()

    def delete(self, name: str) -> None:
        """Delete an object; one that is not there is none to delete."""

        def delete() -> None:
            with contextlib.suppress(FileNotFoundError), self._errors(name, missing=FileNotFoundError):
                self._fs.delete_file(self._path(name))

        self._again(delete)

    def list(self) -> list[Stored]:
        """Return all objects under the prefix."""
        try:
            with self._errors("list", missing=FileNotFoundError):
                found = self._fs.get_file_info(fs.FileSelector(self._root, recursive=True))
        except FileNotFoundError:
            return []
        return [
            Stored(info.path.removeprefix(f"{self._root}/"), info.size, info.mtime.timestamp())
            for info in found
            if info.type == fs.FileType.File
        ]

    def check(self, timeout_s: float) -> None:
        """Write, read, list and delete a small object, so that what is not allowed is known at the start."""
        name = f"check-{time.time_ns():x}-{id(self):x}"

        def all_four(gate: Gate) -> None:
            self.put(name, [np.frombuffer(name.encode(), np.uint8)], gate)
            file = self.open(name)
            found = file.into(0, self.memory(file.nbytes)).tobytes()
            listed = any(stored.name == name for stored in self.list())
            self.delete(name)
            if found != name.encode() or not listed:
                raise TransferError(f"{self} does not return what was stored; is it an S3 server?")

        self.write([all_four], timeout_s, "check")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _errors(self, name: str, missing: type[Exception] = Gone) -> Iterator[None]:
        """Turn what pyarrow raises into our errors, without its words."""
        try:
            yield
        except OSError as error:
            # It may also go between two requests, and then pyarrow knows no better error.
            if isinstance(error, FileNotFoundError) or _GONE.search(str(error)):
                gone = f"{name}: not in {self}; it has been released, has expired or was swept"
                raise missing(gone) from None
            if "AWS Error VALIDATION during GetObject" in str(error):  # the SDK compares checksums too
                raise ChunkCorrupt(
                    name, "checksum of the object", "the one it was stored with", "another"
                ) from None
            raise _explained(f"{name}: {self}", str(error)) from None


class StoredFile:
    """An object that is open for reading. Not thread-safe."""

    def __init__(self, bucket: Bucket, name: str, file: Any) -> None:
        self._bucket, self._file = bucket, file
        self.name = name
        self.nbytes: int = file.size()

    def require_size(self, nbytes: int) -> None:
        """Raise ``ChunkCorrupt`` unless the object has this size."""
        if self.nbytes != nbytes:
            raise ChunkCorrupt(self.name, "size of the object", nbytes, self.nbytes)

    def into(self, offset: int, memory: Run) -> Run:
        """Fill memory of ours with the object's bytes from ``offset`` on, in one request; return it."""
        with self._bucket._errors(self.name):
            self._file.seek(offset)
            read = self._file.readinto(memory)
        if read != memory.nbytes:
            raise ChunkCorrupt(self.name, f"bytes from {offset} on", memory.nbytes, read)
        return memory

    def stored(self) -> Stored:
        """Return size and age."""
        modified = datetime.fromisoformat(self._file.metadata()["Last-Modified"].decode())
        return Stored(self.name, self.nbytes, modified.timestamp())


_CODE: Final = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))?(?: during (\w+) operation)?")
_NAME: Final = re.compile(r"ExceptionName: (\w+)")
_CURL: Final = re.compile(r"curlCode: (\d+), ([\w ]+)")
_GONE: Final = re.compile(r"NO_SUCH_KEY|RESOURCE_NOT_FOUND")
_REFUSED: Final = re.compile(
    r"ACCESS_DENIED|SIGNATURE|ACCESS_KEY|TOKEN|CREDENTIALS|AccessDenied|UserNotFound|AccessKey|Token|"
    r"HTTP status (400|401|403)"
)
_FULL: Final = re.compile(r"Quota|QUOTA|InsufficientStorage|StorageFull|HTTP status 507")


def _explained(what: str, words: str) -> TransferError:
    """Return our error for pyarrow's message, of which only codes are kept."""
    if curl := _CURL.search(words):
        return PeerLost(
            f"{what} cannot be reached: {curl[2].strip()} (curl {curl[1]}); check that the server runs "
            f"and that s3.endpoint and s3.scheme are right"
        )
    code, name = _CODE.search(words), _NAME.search(words)
    reason = f"{code[0] if code else 'unknown error'}{f' ({name[1]})' if name else ''}"
    if "NO_SUCH_BUCKET" in reason:
        return TransferError(f"{what}: there is no such bucket; create it, or correct s3.bucket")
    if "SKEWED" in reason or "TimeTooSkewed" in reason:
        return TransferError(f"{what}: {reason}; set this machine's clock")
    if "HTTP status 409" in reason:
        return Conflict(f"{what}: {reason}; others write there at the same moment")
    if _FULL.search(reason):
        return StoreFull(f"{what}: {reason}; give it more room or lower s3.size_limit")
    if _REFUSED.search(reason):
        return TransferError(
            f"{what} refused: {reason}; check s3.region, the credentials (AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, a profile, web identity, or s3.role_arn), and that they may get, put, "
            f"list and delete there"
        )
    return TransferError(f"{what} failed: {reason}")
