"""The bucket as a rung: a handover whose direct way is down, with a real S3 server."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from test_handover import ALL, RID, Pair, connected

from actors.messages import WorkerSpec
from actors.rungs import Rungs
from actors.transports import make_transports, open_bucket
from experiments.s3_server import S3Server
from kv.bucket import Bucket
from kv.faulty import Fault, FaultyTransport
from kv.memory import MemoryTransport
from kv.s3 import S3Transport
from kv.tcp import TcpTransport


@pytest.fixture
def rung(s3: S3Server) -> Iterator[S3Transport]:
    with closing(Bucket(replace(s3.settings, prefix="t/rung"))) as bucket:
        yield S3Transport(bucket)


def left(s3: S3Server) -> list[str]:
    with closing(Bucket(replace(s3.settings, prefix="t/rung"))) as bucket:
        return [stored.name for stored in bucket.list()]


def test_what_does_not_go_directly_goes_through_the_bucket(s3: S3Server, rung: S3Transport) -> None:
    direct = FaultyTransport(TcpTransport("127.0.0.1", b"k" * 32))
    with connected(direct, rung) as pair:
        probed(pair)
        assert pair.rungs.order("decode-worker", 1).rungs == ("tcp", "s3")
        direct.suffer(Fault("lost"))
        pair.expect()
        pair.open()
        pair.prefill()
        pair.deliver()
        pair.loaded()
        assert pair.written() == ALL
        handed = pair.receiver.handed(RID)
        assert handed is not None
        assert handed.rungs == ("s3",)
        assert direct.fired["lost"] >= 1
        pair.close()
        pair.quiet()
    assert left(s3) == []  # the transport's close waits for the deletions


def test_a_store_that_is_down_is_a_broken_rung_and_no_more(own: S3Server) -> None:
    with (
        closing(Bucket(replace(own.settings, prefix="t/rung", timeout_s=5.0))) as bucket,
        connected(MemoryTransport(), S3Transport(bucket)) as pair,
    ):
        own.stop()
        try:
            probed(pair)
        finally:
            own.start()
        choice = pair.rungs.order("decode-worker", 1)
        assert choice.rungs == ("memory",)
        assert "s3 broken" in choice.reason


def probed(pair: Pair) -> None:
    pair.rungs.meet("decode-worker", "there", pair.rungs.names)
    pair.rungs.probe_due()


def test_a_worker_with_a_bucket_has_it_as_a_rung(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.transports.AUTO", ())
    spec = WorkerSpec("w", "prefill", "m", {}, "auto", s3.settings)
    bucket = open_bucket(spec)
    assert bucket is not None
    with closing(bucket):
        rungs = Rungs(make_transports(spec, bucket))
        assert rungs.names == ("s3",)
        rungs.close()
    with closing(open_bucket(replace(spec, transport="tcp", tier=True))) as bucket:  # type: ignore[type-var]
        assert "s3" not in make_transports(replace(spec, transport="auto"), None)
    assert open_bucket(replace(spec, transport="tcp")) is None
