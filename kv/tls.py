"""TLS between workers: every member of the cluster has a certificate that the cluster's own authority signed.

Both ends of a connection must show one. Host names are not looked at: whoever the authority has signed is a
member, wherever it runs, so the authority must sign nobody else.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from kv.errors import KVError


class TlsError(KVError):
    """A certificate, key or authority cannot be used; names the file."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files.

    Attributes:
        certificate: this member's, followed by those between it and the authority, if any.
        key: its private key, without a passphrase.
        authority: the certificate that has signed every member's.

    """

    certificate: Path
    key: Path
    authority: Path


def contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return what a server and what a client needs. Raises ``TlsError``."""
    made = []
    for purpose in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        for field in ("certificate", "key", "authority"):
            if not (file := getattr(files, field)).is_file():
                raise TlsError(f"tls.{field}: {file} is not a file; give the path of a PEM file")
        try:
            context.load_cert_chain(files.certificate, files.key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            raise TlsError(f"tls: {files.certificate} and {files.key} are no pair in PEM: {error}") from error
        try:
            context.load_verify_locations(files.authority)
        except OSError as error:
            raise TlsError(f"tls.authority: {files.authority} is no certificate in PEM: {error}") from error
        made.append(context)
    return made[0], made[1]


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase; give one without")
