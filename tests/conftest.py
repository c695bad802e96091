"""What the tests of several folders share."""

from collections.abc import Iterator

import pytest

from experiments.s3_server import ENDPOINT, S3Server, s3_server

STOOD_IN = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def s3(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    """A real S3 server with an empty bucket; its credentials are in the environment."""
    with s3_server() as server:
        request.config.stash[STOOD_IN] = server.kind == "moto"
        yield server


@pytest.fixture
def own(s3: S3Server) -> S3Server:
    """The server, where it is ours to stop."""
    if s3.kind == "external":
        pytest.skip("the server is not ours to stop; unset HANDOFF_S3_ENDPOINT to have one that is")
    return s3


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A stand-in is not the real thing, and the summary says so."""
    if config.stash.get(STOOD_IN, False):
        terminalreporter.section("S3 stood in")
        terminalreporter.line(
            "moto's server stood in for an S3 server; tests that need a real one were skipped. "
            f"Install Go (versitygw is then built once), put versitygw on PATH, or set {ENDPOINT}."
        )
