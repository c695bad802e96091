"""Channels between members of a cluster: in order, whole, and closed to everybody else."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from actors import channel
from actors.channel import Channel, ChannelError, Listener, dial

KEY = b"k" * 32
WAIT_S = 10.0


class End:
    """One end of a channel, and everything that came out of it."""

    def __init__(self, opened: Channel) -> None:
        self.channel = opened
        self.got: list[Any] = []
        self.lost: list[str] = []
        opened.open(self.got.append, self.lost.append)

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not done():  # noqa: ASYNC110  a condition, not an event
                await asyncio.sleep(0.001)


class Pair:
    """A listener and a channel to it."""

    def __init__(self) -> None:
        self.accepted: list[End] = []
        self.listener = Listener("127.0.0.1", KEY, lambda opened: self.accepted.append(End(opened)))

    async def connect(self) -> tuple[End, End]:
        """Return (the end that dialled, the end that accepted)."""
        before = len(self.accepted)
        ours = End(await dial(self.listener.address, KEY))
        await ours.until(lambda: len(self.accepted) > before)
        return ours, self.accepted[-1]

    def raw(self) -> socket.socket:
        return socket.create_connection(self.listener.address, timeout=WAIT_S)


def on_loop(play: Callable[[Pair], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that plays on an event loop, with a deadline."""

    def test() -> None:
        async def limited() -> None:
            pair = Pair()
            try:
                await asyncio.wait_for(play(pair), 60)
            finally:
                pair.listener.close()
                for end in pair.accepted:
                    end.channel.close()

        asyncio.run(limited())

    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test


@on_loop
async def test_messages_arrive_in_order_both_ways(pair: Pair) -> None:
    ours, theirs = await pair.connect()
    for number in range(100):
        ours.channel.send(("up", number))
        theirs.channel.send(("down", number))
    await ours.until(lambda: len(ours.got) == len(theirs.got) == 100)
    assert theirs.got == [("up", number) for number in range(100)]
    assert ours.got == [("down", number) for number in range(100)]


@on_loop
async def test_several_messages_at_once_arrive_one_by_one(pair: Pair) -> None:
    ours, theirs = await pair.connect()
    ours.channel.send("first")
    ours.channel.send(*(("one of", number) for number in range(100)), os.urandom(1 << 20))
    ours.channel.send("last")
    await ours.until(lambda: len(theirs.got) == 103)
    assert theirs.got[1:101] == [("one of", number) for number in range(100)]
    assert (theirs.got[0], len(theirs.got[101]), theirs.got[102]) == ("first", 1 << 20, "last")


@on_loop
async def test_a_message_larger_than_any_buffer(pair: Pair) -> None:
    ours, theirs = await pair.connect()
    large = os.urandom(20 << 20)
    ours.channel.send(large)
    ours.channel.send("after")
    await ours.until(lambda: len(theirs.got) == 2)
    assert theirs.got == [large, "after"]


@on_loop
async def test_threads_send_at_once(pair: Pair) -> None:
    """Whole messages, each thread's in order, also while the other side takes nothing."""
    ours, theirs = await pair.connect()
    filler = b"x" * 5000

    def send(thread: int) -> None:
        for number in range(300):
            ours.channel.send((thread, number, filler))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:  # blocks the loop: nothing is read meanwhile
        thread.join(WAIT_S)
    await ours.until(lambda: len(theirs.got) == 1200)
    for thread_number in range(4):
        assert [number for thread, number, _ in theirs.got if thread == thread_number] == list(range(300))


@on_loop
async def test_the_other_side_learns_of_the_end_once(pair: Pair) -> None:
    ours, theirs = await pair.connect()
    ours.channel.send("last words")
    ours.channel.close()
    ours.channel.close()
    await theirs.until(lambda: theirs.lost)
    await asyncio.sleep(0.02)
    assert (theirs.got, theirs.lost, ours.lost) == (["last words"], ["the connection was closed"], [])
    ours.channel.send("into the void")
    theirs.channel.send("into the void")


@on_loop
async def test_a_message_that_cannot_be_handled_does_not_end_the_channel(pair: Pair) -> None:
    opened = await dial(pair.listener.address, KEY)
    got: list[Any] = []

    def handle(message: Any) -> None:
        got.append(1 / message)

    opened.open(handle, got.append)
    theirs = pair.accepted[-1] if pair.accepted else None
    while theirs is None:
        await asyncio.sleep(0.001)
        theirs = pair.accepted[-1] if pair.accepted else None
    theirs.channel.send(0)
    theirs.channel.send(2)
    await theirs.until(lambda: got)
    assert got == [0.5]
    opened.close()


@on_loop
async def test_a_peer_that_takes_nothing_is_given_up(pair: Pair) -> None:
    ours, theirs = await pair.connect()
    loop = asyncio.get_running_loop()
    loop.remove_reader(theirs.channel._socket.fileno())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "MAX_UNSENT_BYTES", 1 << 20)
        for _ in range(64):
            ours.channel.send(b"x" * (1 << 18))
        await ours.until(lambda: ours.lost)
    assert "has not taken" in ours.lost[0]


# -- strangers ------------------------------------------------------------------------------------


@on_loop
async def test_another_secret_is_refused_by_both_sides(pair: Pair) -> None:
    with pytest.raises(ChannelError, match=r"closed the connection|does not hold"):
        await dial(pair.listener.address, b"o" * 32)
    assert pair.accepted == []


@on_loop
async def test_a_listener_without_the_secret_gets_nothing(pair: Pair) -> None:
    """Whoever answers on a worker's old address must prove itself too."""
    impostor = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = impostor.accept()
        sock.sendall(b"n" * channel.NONCE_BYTES + b"p" * channel.PROOF_BYTES)
        sock.recv(1 << 10)
        sock.recv(1 << 10)

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(ChannelError, match="does not hold this cluster's secret"):
        await dial(impostor.getsockname()[:2], KEY)
    impostor.close()


@on_loop
async def test_a_handshake_cannot_be_reflected(pair: Pair) -> None:
    """Two of our own listeners' answers cannot be played against each other."""
    with pair.raw() as sock:
        loop = asyncio.get_running_loop()
        nonce = await loop.run_in_executor(None, sock.recv, channel.NONCE_BYTES)
        await loop.run_in_executor(None, sock.sendall, nonce + b"\0" * channel.PROOF_BYTES)
        assert await loop.run_in_executor(None, sock.recv, 1) == b""
    assert pair.accepted == []


@on_loop
async def test_a_silent_stranger_is_dropped(pair: Pair) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.05)
        with pair.raw() as sock:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, sock.recv, channel.NONCE_BYTES)
            assert await loop.run_in_executor(None, sock.recv, 1) == b""
    assert pair.accepted == []


@pytest.mark.parametrize("what", ["flipped", "replayed", "too long", "truncated"])
def test_a_frame_that_is_not_as_it_was_sent_ends_the_channel(what: str) -> None:
    @on_loop
    async def play(pair: Pair) -> None:
        ours, theirs = await pair.connect()
        sent: list[bytes] = []
        plain = ours.channel._socket
        tap = _Tap(plain, sent)
        ours.channel._socket = tap  # type: ignore[assignment]
        ours.channel.send("first")
        await ours.until(lambda: theirs.got == ["first"])
        frame = sent[0]
        bad = {
            "flipped": frame[:-1] + bytes([frame[-1] ^ 1]),
            "replayed": frame,
            "too long": channel.LENGTH.pack(channel.MAX_FRAME_BYTES + 1) + frame[4:],
            "truncated": frame[:-3],
        }[what]
        plain.send(bad)
        if what == "truncated":
            plain.shutdown(socket.SHUT_WR)
        await ours.until(lambda: theirs.lost)
        assert theirs.got == ["first"]
        expected = {"too long": "announced", "truncated": "was closed"}.get(what, "forged or damaged")
        assert expected in theirs.lost[0]
        ours.channel.close()

    play()


class _Tap:
    """A socket that keeps what was sent through it."""

    def __init__(self, sock: socket.socket, sent: list[bytes]) -> None:
        self._sock, self._sent = sock, sent

    def send(self, data: Any) -> int:
        self._sent.append(bytes(data))
        return self._sock.send(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@on_loop
async def test_nobody_is_there(pair: Pair) -> None:
    free = socket.create_server(("127.0.0.1", 0))
    address = free.getsockname()[:2]
    free.close()
    with pytest.raises(ChannelError, match=f"no connection to {address[0]}:{address[1]}"):
        await dial(address, KEY)


@on_loop
async def test_nobody_answers_in_time(pair: Pair) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(ChannelError, match="within 0 s"):
        await dial(silent.getsockname()[:2], KEY, 0.05)
    silent.close()
