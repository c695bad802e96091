"""What the tests of S3 share."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.s3_server import S3Server
from kv.bucket import Bucket


@pytest.fixture
def bucket(s3: S3Server, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A prefix of the test's own, empty at the start and at the end."""
    with closing(Bucket(replace(s3.settings, prefix=f"t/{abs(hash(request.node.nodeid)):x}"))) as bucket:
        empty(bucket)
        yield bucket
        empty(bucket)


def empty(bucket: Bucket) -> None:
    for stored in bucket.list():
        bucket.delete(stored.name)


@pytest.fixture
def files(s3: S3Server, bucket: Bucket) -> Path:
    """The folder with the test's objects as plain files."""
    if s3.folder is None:
        pytest.skip(f"the files of {s3.kind} cannot be reached; install Go, or put versitygw on PATH")
    return s3.folder / bucket.settings.bucket / bucket.settings.prefix
