"""TCP with TLS: everything that a transport must do, and who is let in."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from transport_suite import WAIT_S, TransportSuite, fetched, nothing, payload, room, same

import kv.tcp
from kv.errors import PeerLost, TransferError
from kv.tcp import TcpTicket, TcpTransport
from kv.tls import TlsError, TlsFiles, contexts
from kv.transport import Ticket, Transport

HERE, KEY = "127.0.0.1", b"k" * 32


class Authority:
    """Signs members of one cluster."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._write(f"{name}.pem", self._signed(name, self._key, authority=True))

    def member(self, name: str) -> TlsFiles:
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        certificate = self._write(f"{self._name}-{name}.pem", self._signed(name, key))
        return TlsFiles(certificate, self._write(f"{self._name}-{name}.key", private), self.certificate)

    def _signed(self, name: str, key: ec.EllipticCurvePrivateKey, authority: bool = False) -> bytes:
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def _write(self, name: str, data: bytes) -> Path:
        (self._folder / name).write_bytes(data)
        return self._folder / name


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture
def sender(authority: Authority) -> Iterator[TcpTransport]:
    with closing(TcpTransport(HERE, KEY, authority.member("sender"))) as transport:
        yield transport


@pytest.fixture
def receiver(authority: Authority) -> Iterator[TcpTransport]:
    with closing(TcpTransport(HERE, KEY, authority.member("receiver"))) as transport:
        yield transport


class TestTcpWithTls(TransportSuite):
    copies = False

    @pytest.fixture
    def sender(self, authority: Authority) -> Iterator[Transport]:
        with closing(TcpTransport(HERE, KEY, authority.member("sender"))) as transport:
            yield transport

    @pytest.fixture
    def receiver(self, authority: Authority) -> Iterator[Transport]:
        with closing(TcpTransport(HERE, KEY, authority.member("receiver"))) as transport:
            yield transport

    @pytest.fixture(autouse=True)
    def deaf(self) -> Iterator[None]:
        """A server that the kernel accepts connections for, and nobody answers them."""
        with socket.create_server((HERE, 0)) as self.listener:
            yield

    def late_ticket(self) -> Ticket:
        sizes = tuple(run.nbytes for run in payload(0))
        return TcpTicket(*self.listener.getsockname()[:2], b"p" * 16, sizes)

    def lost_ticket(self, sender: Transport) -> Ticket:
        ticket = sender.publish(payload(0), nothing)
        sender.release(ticket)
        return ticket


def test_what_crosses_is_encrypted(sender: TcpTransport, receiver: TcpTransport) -> None:
    ticket = sender.publish(payload(1), nothing)
    for _ in range(3):  # and the connection is used again
        assert same(fetched(receiver, ticket, payload(1)), payload(1))
    ((connection,),) = receiver._idle.values()
    assert isinstance(connection.socket, ssl.SSLSocket)
    assert connection.socket.version() == "TLSv1.3"


def test_who_is_no_member_gets_nothing(
    sender: TcpTransport, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cluster's key, but without TLS, or with a certificate that somebody else signed."""
    monkeypatch.setattr(kv.tcp, "STRANGER_TIMEOUT_S", 0.5)  # without TLS, both wait for the other
    ticket, like = sender.publish(payload(2), nothing), payload(2)
    theirs = Authority(tmp_path, "theirs").member("stranger")
    gullible = TlsFiles(theirs.certificate, theirs.key, authority.certificate)
    strangers: list[tuple[TlsFiles | None, type[TransferError], str]] = [
        (None, PeerLost, "is gone"),
        (theirs, TransferError, r"has a certificate that tls\.authority has not signed"),
        (gullible, PeerLost, "alert"),
    ]
    for files, error, message in strangers:
        with closing(TcpTransport(HERE, KEY, files)) as stranger:
            into = room(like)
            with pytest.raises(error, match=message):
                stranger.fetch(ticket, into, WAIT_S)
            assert not any(run.any() for run in into)


@pytest.mark.parametrize("field", ["certificate", "key", "authority"])
def test_files_that_are_missing_or_of_no_use_are_named(
    authority: Authority, tmp_path: Path, field: str
) -> None:
    good = authority.member("other")
    for file, message in ((tmp_path / "nothing.pem", "is not a file"), (tmp_path / "junk.pem", "PEM")):
        (tmp_path / "junk.pem").write_text("junk")
        parts = {name: getattr(good, name) for name in ("certificate", "key", "authority")}
        with pytest.raises(TlsError, match=f"{file.name}.*{message}"):
            contexts(TlsFiles(**{**parts, field: file}))
