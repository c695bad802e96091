"""The bucket of a cluster file: what workers are told of it, and whether it can be used."""

from __future__ import annotations

from typing import Final

from cluster.errors import BringUpError
from cluster.file import ClusterFile
from kv.bucket import Bucket, S3Settings
from kv.errors import TransferError

TRIED_FOR_S: Final = 20.0


def settings(file: ClusterFile) -> S3Settings | None:
    """Return what workers are told of the bucket; None: the file names none."""
    return None if file.s3 is None else S3Settings(**file.s3.model_dump(exclude={"tier"}))


def trouble(told: S3Settings) -> str:
    """Write, read, list and delete an object; return what went wrong and the remedy, or an empty text."""
    try:
        bucket = Bucket(told)
    except TransferError as error:
        return str(error)
    try:
        bucket.check(TRIED_FOR_S)
    except TransferError as error:
        return str(error)
    finally:
        bucket.close()
    return ""


def require(file: ClusterFile) -> None:
    """Raise BringUpError unless the bucket can be used from this machine.

    A store that goes later is a way that KV does not take for a while; one that was never there is a mistake.
    """
    told = settings(file)
    if told is not None and (why := trouble(told)):
        where = told.endpoint or f"AWS {told.region}"
        raise BringUpError(
            f"{file.name!r} cannot be brought up: s3: bucket {told.bucket!r} at {where} cannot be used from "
            f"this machine: {why}; or leave `s3` out, and KV goes directly only"
        )
