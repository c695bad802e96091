"""S3 as a transport, on a real server: what every transport must do, and what a store may do wrong."""

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace

import numpy as np
import pytest
from transport_suite import WAIT_S, Read, TransportSuite, fetched, nothing, payload, room, same, until

from experiments.s3_server import S3Server, environment, s3_server
from kv.bucket import CONFLICTS, Bucket, Conflict, Gate, S3Settings, StoredFile
from kv.chunk import Run
from kv.errors import ChunkCorrupt, PeerLost, TransferError, TransferTimeout
from kv.s3 import RANGE_BYTES, S3Ticket, S3Transport, _ranges
from kv.transport import Ticket, Transport

PATIENCE_S = 5.0
"""A deadline of a second is kept within this, on a busy machine."""


@pytest.fixture
def transport(bucket: Bucket) -> Iterator[S3Transport]:
    with closing(S3Transport(bucket)) as transport:
        yield transport


class TestS3(TransportSuite):
    @pytest.fixture(autouse=True)
    def server(self, s3: S3Server, bucket: Bucket) -> Iterator[None]:
        self.s3, self.bucket, self.silent = s3, bucket, False
        yield
        if self.silent:
            os.kill(s3.pid, signal.SIGCONT)

    @pytest.fixture
    def sender(self, bucket: Bucket) -> Iterator[Transport]:
        with closing(S3Transport(bucket)) as transport:
            yield transport

    @pytest.fixture
    def receiver(self, bucket: Bucket) -> Iterator[Transport]:
        with closing(Bucket(bucket.settings)) as other, closing(S3Transport(other)) as transport:
            yield transport

    def late_ticket(self) -> Ticket:
        """The server has the payload and goes silent."""
        if self.s3.kind == "external":
            pytest.skip("the server is not ours to stop; unset HANDOFF_S3_ENDPOINT to have one that is")
        ticket = S3Transport(self.bucket).publish(payload(0), nothing)
        os.kill(self.s3.pid, signal.SIGSTOP)
        self.silent = True
        return ticket

    def lost_ticket(self, sender: Transport) -> Ticket:
        ticket = sender.publish(payload(0), nothing)
        sender.release(ticket)
        until(lambda: self.bucket.find(ticket.name) is None, "the payload is deleted")
        return ticket


# -- ranges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_ranges_cover_what_is_wanted_and_nothing_else(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = [int(size) for size in random.integers(0, 3 << 20, 40)]
    into = [np.empty(size, np.uint8) if random.random() < 0.7 else None for size in sizes]
    starts = np.cumsum([0, *sizes])
    ranges = list(_ranges(sizes, into))
    covered = [byte for one in ranges for byte in (one.start, one.start + one.nbytes)]
    assert covered == sorted(covered)
    assert all(sum(run.nbytes for run in one.targets) == one.nbytes <= RANGE_BYTES for one in ranges)
    wanted = sum(run.nbytes for run in into if run is not None)
    assert sum(one.nbytes for one in ranges) == wanted
    for start, run in zip(starts, into, strict=False):
        if run is not None and run.nbytes:  # its bytes come from its place in the object
            at = start
            for one in ranges:
                position = one.start
                for target in one.targets:
                    if np.shares_memory(target, run):
                        assert position == at
                        at += target.nbytes
                    position += target.nbytes
            assert at == start + run.nbytes


def test_blocks_are_read_many_at_once_and_large_runs_in_parts() -> None:
    blocks = [np.empty(1 << 18, np.uint8)] * 64
    assert [one.nbytes for one in _ranges([1 << 18] * 64, blocks)] == [RANGE_BYTES] * 2
    assert [one.nbytes for one in _ranges([20 << 20], [np.empty(20 << 20, np.uint8)])] == [
        RANGE_BYTES,
        RANGE_BYTES,
        4 << 20,
    ]


def test_large_payloads_come_in_parts_and_ranges(transport: S3Transport) -> None:
    """35 MB: several parts up, many ranges down, into scattered memory."""
    runs, nbytes = 50, 700_001
    source = np.frombuffer(np.random.default_rng(0).bytes(runs * nbytes), np.uint8).reshape(runs, nbytes)
    target = np.zeros_like(source)
    places = np.random.default_rng(1).permutation(runs)
    ticket = transport.publish(list(source[places]), nothing)
    transport.fetch(ticket, [target[place] for place in places], 60.0)
    assert np.array_equal(source, target)
    target[:] = 0
    transport.fetch(ticket, [target[p] if i % 3 else None for i, p in enumerate(places)], 60.0)
    for i, place in enumerate(places):
        assert np.array_equal(target[place], source[place]) if i % 3 else not target[place].any()


# -- an object that is not what was published ---------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 12_308, 12_310, 50_000])
def test_an_object_of_another_size(transport: S3Transport, bucket: Bucket, nbytes: int) -> None:
    sent = payload(1)
    ticket = transport.publish(sent, nothing)
    assert ticket.nbytes == 12_309
    bucket.put(ticket.name, [np.zeros(nbytes, np.uint8)], Gate())
    with pytest.raises(ChunkCorrupt, match=f"size of the object is {nbytes}, expected 12309"):
        fetched(transport, ticket, sent)


def test_a_payload_that_was_never_there_is_named(transport: S3Transport) -> None:
    with pytest.raises(PeerLost, match=r"handover/none: not in s3://.*released, has expired or was swept"):
        transport.fetch(S3Ticket("handover/none", (8,)), [np.zeros(8, np.uint8)], WAIT_S)


def test_released_payloads_leave_the_bucket(transport: S3Transport, bucket: Bucket) -> None:
    tickets = [transport.publish(payload(seed), nothing) for seed in range(4)]
    assert len(bucket.list()) == 4
    transport.release(tickets[0])
    until(lambda: len(bucket.list()) == 3, "the first is deleted")
    transport.close()
    assert bucket.list() == []


def test_a_sender_that_dies_leaves_its_payload_to_whoever_has_the_ticket(bucket: Bucket) -> None:
    with closing(Bucket(bucket.settings)) as dying:
        ticket = S3Transport(dying).publish(payload(3), nothing)
    ticket = pickle.loads(pickle.dumps(ticket))
    assert same(fetched(S3Transport(bucket), ticket, payload(3)), payload(3))


# -- a server that is down ------------------------------------------------------------------------------


@pytest.fixture
def brief(bucket: Bucket) -> Iterator[S3Transport]:
    """A transport whose uploads have a second."""
    with closing(Bucket(replace(bucket.settings, timeout_s=1.0))) as bucket:
        yield S3Transport(bucket)


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_server_that_goes_down_and_comes_back(own: S3Server, brief: S3Transport, how: str) -> None:
    sent, endpoint = payload(1), str(own.settings.endpoint)
    ticket = brief.publish(sent, nothing)
    own.stop() if how == "killed" else os.kill(own.pid, signal.SIGSTOP)
    try:
        read = Read()
        for call in (
            lambda: brief.publish(payload(2), read),
            lambda: brief.fetch(ticket, room(sent), 1.0),
        ):
            started = time.monotonic()
            with pytest.raises((PeerLost, TransferTimeout)) as caught:
                call()
            assert time.monotonic() - started < PATIENCE_S
            for part in ("s3://handoff-test/", endpoint, "check that the server runs"):
                assert part in str(caught.value)
        assert read.calls == 0
    finally:
        own.start() if how == "killed" else os.kill(own.pid, signal.SIGCONT)
    assert own.kind == "moto" or same(fetched(brief, ticket, sent), sent)
    again = brief.publish(sent, nothing)
    assert same(fetched(brief, again, sent), sent)


def test_a_server_that_dies_in_the_middle_of_a_payload(
    own: S3Server, brief: S3Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [np.random.default_rng(i).integers(0, 256, 1 << 20, dtype=np.uint8) for i in range(32)]
    into, ranges, read_range = room(sent), [0], StoredFile.into
    ticket = brief.publish(sent, nothing)
    lock = threading.Lock()

    def dies_at_the_third(file: StoredFile, offset: int, memory: Run) -> Run:
        with lock:
            ranges[0] += 1
            if ranges[0] == 3:
                own.stop()
        return read_range(file, offset, memory)

    monkeypatch.setattr(StoredFile, "into", dies_at_the_third)
    try:
        with pytest.raises((PeerLost, TransferTimeout), match="s3://handoff-test/"):
            brief.fetch(ticket, into, 3.0)
        assert ranges[0] >= 3
    finally:
        monkeypatch.undo()
        own.start()
    if own.kind != "moto":
        assert same(fetched(brief, ticket, sent), sent)


def test_nothing_is_written_after_a_fetch_has_given_up(
    transport: S3Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes late, when the memory belongs to another request."""
    sent, into, go = payload(5), room(payload(5)), threading.Event()
    ticket, late, read_range = transport.publish(sent, nothing), threading.Event(), StoredFile.into

    def slow(file: StoredFile, offset: int, memory: Run) -> Run:
        assert go.wait(WAIT_S)
        arrived = read_range(file, offset, memory)
        late.set()
        return arrived

    monkeypatch.setattr(StoredFile, "into", slow)
    with pytest.raises(TransferTimeout):
        transport.fetch(ticket, into, 0.1)
    go.set()
    assert late.wait(WAIT_S)
    monkeypatch.undo()
    assert same(fetched(transport, ticket, sent), sent)
    assert not any(run.any() for run in into)


def test_an_upload_that_nobody_waits_for_any_more_is_deleted(
    own: S3Server, brief: S3Transport, bucket: Bucket
) -> None:
    os.kill(own.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TransferTimeout):
            brief.publish(payload(1), nothing)
    finally:
        os.kill(own.pid, signal.SIGCONT)
    brief._bucket._writers.shutdown(wait=True)  # the upload goes on meanwhile
    assert bucket.list() == []


def test_a_gate_holds_its_owner_until_all_are_out() -> None:
    gate, order = Gate(), list[str]()
    with ThreadPoolExecutor(1) as pool:
        with gate.inside():
            closing_it = pool.submit(lambda: (gate.close(), order.append("closed")))
            time.sleep(0.05)
            order.append("out")
        closing_it.result(timeout=WAIT_S)
    assert order == ["out", "closed"]
    with pytest.raises(TransferTimeout), gate.inside():
        pass


# -- what is wrong with the settings --------------------------------------------------------------------


def calls(settings: S3Settings) -> Iterator[str]:
    """What each call says when it fails."""
    with closing(Bucket(settings)) as bucket:
        transport = S3Transport(bucket)
        for call in (
            lambda: transport.publish(payload(1), nothing),
            lambda: transport.fetch(S3Ticket("handover/x", (8,)), [np.zeros(8, np.uint8)], WAIT_S),
            lambda: bucket.list(),
            lambda: bucket.check(WAIT_S),
        ):
            with pytest.raises(TransferError) as caught:
                call()
            assert caught.value.__cause__ is None
            assert caught.value.__suppress_context__
            yield str(pickle.loads(pickle.dumps(caught.value)))


@pytest.mark.parametrize("wrong", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials_are_refused_and_not_repeated(own: S3Server, wrong: str) -> None:
    if own.kind == "moto":
        pytest.skip("moto takes any credentials; install Go, or put versitygw on PATH")
    values = {**own.credentials, wrong: "WRONGwrongWRONGwrong"}
    with environment(values):
        messages = list(calls(own.settings))
    for message in messages:
        assert "s3://handoff-test/handoff" in message
        assert str(own.settings.endpoint) in message
        assert not any(values[name] in message for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"))
        assert "wrong" not in message.lower()
    if wrong == "AWS_ACCESS_KEY_ID":
        del messages[1]  # versitygw answers HEAD as if the object were not there
    assert all("check s3.region, the credentials" in message for message in messages)


def test_a_missing_bucket_is_named_with_the_remedy(s3: S3Server) -> None:
    messages = list(calls(replace(s3.settings, bucket="nothing-here")))
    assert all("s3://nothing-here/handoff" in message for message in messages)
    for message in (messages[0], messages[2], messages[3]):
        assert "create it, or correct s3.bucket" in message


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
    for message in calls(S3Settings("none", endpoint=endpoint, scheme="http")):
        assert f"s3://none/handoff at {endpoint} cannot be reached" in message
        assert "s3.endpoint" in message


def test_a_good_bucket_passes_the_check(bucket: Bucket) -> None:
    bucket.check(WAIT_S)
    assert bucket.list() == []


def test_settings_and_bucket_hold_no_secret(s3: S3Server, bucket: Bucket) -> None:
    assert not {field.name for field in fields(S3Settings)} & {"access_key", "secret_key", "session_token"}
    shown = f"{bucket} {bucket!r} {bucket.settings!r} {s3!r}"
    for secret in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        assert os.environ[secret] not in shown


def test_a_role_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server("moto") as moto:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://{moto.settings.endpoint}")
        role = "arn:aws:iam::123456789012:role/kv"
        with closing(Bucket(replace(moto.settings, role_arn=role, external_id="x"))) as bucket:
            bucket.check(WAIT_S)
        assert '"POST / HTTP/1.1" 200' in moto.log  # nothing else asks the token service


def test_a_role_that_cannot_be_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://{nobody}")
    role = "arn:aws:iam::123456789012:role/kv"
    settings = S3Settings("none", endpoint=nobody, scheme="http", role_arn=role, timeout_s=5.0)
    with pytest.raises(TransferError, match="s3://none/handoff"), closing(Bucket(settings)) as bucket:
        bucket.check(5.0)


def test_a_closed_bucket_says_so(bucket: Bucket) -> None:
    closed = Bucket(bucket.settings)
    transport = S3Transport(closed)
    ticket = transport.publish(payload(1), nothing)
    closed.close()
    with pytest.raises(PeerLost, match="has been closed"):
        transport.fetch(ticket, room(payload(1)), WAIT_S)
    transport.release(ticket)
    assert transport.live() == (0, 0)


def test_a_request_that_meets_another_one_is_made_again(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "AWS Error UNKNOWN (HTTP status 409) during PutObject operation: ExceptionName: OperationAborted"

    class Busy:
        """A file system on which others write at the same moment."""

        def __init__(self, conflicts: int) -> None:
            self.conflicts, self.inner = conflicts, fs

        def open_output_stream(self, path: str, compression: None) -> object:
            self.conflicts -= 1
            if self.conflicts >= 0:
                raise OSError(words)
            return self.inner.open_output_stream(path, compression=compression)

    fs, sent = bucket._fs, np.arange(9, dtype=np.uint8)
    monkeypatch.setattr(bucket, "_fs", Busy(CONFLICTS))
    bucket.put("x", [sent], Gate())
    monkeypatch.setattr(bucket, "_fs", Busy(CONFLICTS + 1))
    with pytest.raises(Conflict, match=r"HTTP status 409.*OperationAborted.*others write there"):
        bucket.put("y", [sent], Gate())
    monkeypatch.undo()
    assert [stored.name for stored in bucket.list()] == ["x"]
