"""What breaks while requests run, on the fake engine: every answer is whole and right, and nothing is left.

The fake engine's tokens follow from all KV of a request, so an answer that was put together wrongly shows.
All tests share a cluster.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from asking import SETTLED_WITHIN_S
from comparing import prompt
from test_storm import VOCAB

from actors.fake_kv import continuation
from experiments.chaos import Parameters, cluster_file, strike
from experiments.faulty_serve import CommandError, Controls, gone, served_faulty, until
from experiments.storm import Load, plans, wrong
from kv.faulty import DAMAGES, Fault

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

AT_ONCE, MOST_TOKENS = 12, 40
RUNGS = ("tcp", "plasma")
PREFILL, DECODE = ("prefill-worker-0", "prefill-worker-1"), ("decode-worker-0", "decode-worker-1")
FIRED_WITHIN_S, BACK_WITHIN_S, MENDED_WITHIN_S = 60.0, 120.0, 150.0
"""Probes of a rung that breaks again and again wait up to half a minute each (``kv.ladder``)."""

PROMPTS = [prompt(300 + 900 * i // 40, f"chaos {i}") for i in range(40)]
"""Of 2 to 5 chunks each: no step computes more than 256 tokens."""
RIGHT = {tuple(tokens): continuation(tokens, MOST_TOKENS, VOCAB) for tokens in PROMPTS}
PLANS = plans(400, 3, PROMPTS, MOST_TOKENS, aborted=0.0, decode_samples=0.0)


@pytest.fixture(scope="module")
def four(model: Path) -> Iterator[Controls]:
    """Two gateways, and two prefill and two decode nodes, each with one worker."""
    # Ray goes on in files when a store is full, while the disk is not; here it may not.
    full = {"RAY_local_fs_capacity_threshold": "0.01"}
    with served_faulty(cluster_file(str(model)), full) as controls:
        yield controls


@pytest.fixture
def sound(four: Controls) -> Iterator[Controls]:
    """All workers are there and sound, before and after."""
    until(lambda: len(four.alive()) == 4, "all workers are alive", BACK_WITHIN_S)
    yield four
    four.ask("drain")
    for name in four.alive():
        four.worker(name, "free")
        for rung in RUNGS:
            four.worker(name, "suffer", rung)


@contextmanager
def load(controls: Controls) -> Iterator[Load]:
    """Requests run during the block; then all of them were answered, rightly, and have left nothing."""
    with Load(lambda: controls.url, "tiny", PLANS, AT_ONCE) as running:
        until(lambda: running.answered() >= AT_ONCE, "requests run")
        yield running
    assert not wrong(running.outcomes, RIGHT)
    print(f"{running.answered()} requests; {controls.settled(SETTLED_WITHIN_S):.1f} s until nothing was left")


def grows(controls: Controls, name: str, stage: str, by: int = 1) -> Callable[[], bool]:
    """Return whether a worker has reached a stage so many times more than now."""
    before = reached(controls, name, stage)
    return lambda: reached(controls, name, stage) >= before + by


def reached(controls: Controls, name: str, stage: str) -> int:
    """How often a worker has reached a stage; one that has just come back is asked until it answers."""
    deadline = time.monotonic() + BACK_WITHIN_S
    while True:
        try:
            return int(controls.worker(name, "reached").get(stage, 0))
        except CommandError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def fired(controls: Controls, name: str, rung: str, *kinds: str) -> int:
    found = controls.worker(name, "fired", rung)
    return sum(found.get(kind, 0) for kind in kinds)


def failed(controls: Controls, name: str, key: str) -> int:
    return controls.stats(name).failed.get(key, 0)


def mended(controls: Controls, rung: str) -> bool:
    """Whether a rung is sound between all pairs."""
    rates = [controls.stats(name).rates for name in PREFILL]
    return all(found.get(f"{peer} {rung}", 0) > 0 for found in rates for peer in DECODE)


def all_mended(controls: Controls) -> None:
    until(lambda: all(mended(controls, rung) for rung in RUNGS), "all rungs are sound", MENDED_WITHIN_S)


@contextmanager
def held(controls: Controls, rung: str = "tcp", then: Sequence[Fault] = ()) -> Iterator[None]:
    """During the block no decode worker gets any KV, and each has begun to fetch; prefill goes on.

    Then they have these faults over tcp; a worker that died meanwhile has none.
    """
    before = {name: fired(controls, name, rung, "held") for name in DECODE}
    for name in DECODE:
        for each in RUNGS:
            controls.worker(name, "suffer", each, Fault("held"))
    for name in DECODE:
        until(lambda name=name: fired(controls, name, rung, "held") > before[name], f"{name} fetches")  # type: ignore[misc]
    yield
    for name in DECODE:
        with suppress(CommandError):
            controls.worker(name, "suffer", "plasma")
            controls.worker(name, "suffer", "tcp", *then)


# -- workers die ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("post 0", "take 0"), ("post 1", "take 1"), ("post end", "take end")],
    ids=["before the first", "between chunks", "before the end"],
)
def test_workers_die_amid_a_transfer(sound: Controls, prefill: str, decode: str) -> None:
    with load(sound):
        for name, stage in ((PREFILL[0], prefill), (DECODE[0], decode)):
            pid = sound.die_at(name, stage)
            until(lambda pid=pid: gone(pid), f"{name} dies at {stage}", FIRED_WITHIN_S)  # type: ignore[misc]
        until(lambda: len(sound.alive()) < 4, "they are missed")
        until(lambda: len(sound.alive()) == 4, "all workers are alive", BACK_WITHIN_S)


def test_workers_die_after_prefills_part_while_decode_fetches(sound: Controls) -> None:
    with load(sound):
        ended = grows(sound, PREFILL[0], "post end")  # from here on: prefill may be done before both fetch
        with held(sound):
            until(
                lambda: ended() and sound.stats(PREFILL[0]).live_chunks > 0,
                "prefill has ended a part that is not fetched",
                FIRED_WITHIN_S,
            )
            pid = sound.worker(PREFILL[0], "pid")
            os.kill(pid, signal.SIGKILL)
            until(lambda: gone(pid), "prefill dies")
        with held(sound):
            pid = sound.die_at(DECODE[1], "take end")
            until(lambda: gone(pid), "decode dies", FIRED_WITHIN_S)
        until(lambda: len(sound.alive()) == 4, "all workers are alive", BACK_WITHIN_S)


# -- KV is damaged -------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", RUNGS)
def test_every_damage_is_found(sound: Controls, rung: str) -> None:
    """What was damaged, and nothing else, counts as corrupt; and no wrong token comes of it.

    The other rung is out of order, so that every chunk takes this one, once a probe has mended it.
    """
    (other,) = set(RUNGS) - {rung}
    injected = {name: fired(sound, name, rung, *DAMAGES) for name in DECODE}
    found = {name: failed(sound, name, f"{rung} corrupt") for name in DECODE}
    assert injected == found
    with load(sound):
        for name in DECODE:
            sound.worker(name, "suffer", other, Fault("lost"))
            sound.worker(name, "suffer", rung, *(Fault(kind, times=1) for kind in DAMAGES))
        for name in DECODE:
            until(
                lambda name=name: (  # type: ignore[misc]
                    fired(sound, name, rung, *DAMAGES) - injected[name] == len(DAMAGES)
                ),
                f"all of it has happened at {name}",
                MENDED_WITHIN_S,
            )
        for name in DECODE:
            sound.worker(name, "suffer", other)
    for name in DECODE:
        assert failed(sound, name, f"{rung} corrupt") - found[name] == len(DAMAGES)
    all_mended(sound)


# -- the object store is full ------------------------------------------------------------------------


def test_the_object_store_is_full(sound: Controls) -> None:
    """While decode fetches, between two chunks of a request, and before the first."""
    all_mended(sound)
    full = {name: failed(sound, name, "plasma full") for name in PREFILL}
    with load(sound):
        with held(sound, then=[Fault("lost")]):
            for node in ("prefill-0", "prefill-1"):
                assert sound.ask("fill", node) > 40 << 20
        for name in PREFILL:
            until(
                lambda name=name: failed(sound, name, "plasma full") > full[name],  # type: ignore[misc]
                f"{name} has no room to publish a chunk again",
                FIRED_WITHIN_S,
            )
        sound.ask("drain")
        until(lambda: mended(sound, "plasma"), "there is room again", MENDED_WITHIN_S)
        assert not mended(sound, "tcp")
        before, between = grows(sound, PREFILL[0], "failed 0"), grows(sound, PREFILL[0], "failed 1")
        waiting = grows(sound, PREFILL[0], "post 0")
        sound.worker(PREFILL[0], "hold_at", "post 0")
        until(waiting, "a first chunk is published", FIRED_WITHIN_S)
        with held(sound, "plasma", then=[Fault("lost")]):  # or there is room again once it is fetched
            assert sound.ask("fill", "prefill-0") > 40 << 20
            sound.worker(PREFILL[0], "free")
            until(between, "the store is full after the first chunk", FIRED_WITHIN_S)
        until(before, "the store is full before the first chunk", FIRED_WITHIN_S)
        sound.ask("drain")
        for name in DECODE:
            sound.worker(name, "suffer", "tcp")
        until(lambda: mended(sound, "tcp"), "a probe has mended tcp", MENDED_WITHIN_S)


# -- a gateway dies ----------------------------------------------------------------------------------


def test_a_gateway_dies(sound: Controls) -> None:
    """The other serves on; clients whose connection broke ask again; workers forget what it had asked."""
    until(lambda: len(sound.gateways()) == 2, "both gateways serve", BACK_WITHIN_S)
    with load(sound) as running:
        victim, other = sound.gateways()
        os.kill(victim, signal.SIGKILL)
        until(lambda: gone(victim), "it is dead")
        answered = running.answered()
        until(lambda: running.answered() > answered + AT_ONCE, "the other one serves")
        assert other in sound.gateways()
        until(lambda: len(sound.gateways()) == 2, "there are two again", BACK_WITHIN_S)
    assert any(outcome.broken for outcome in running.outcomes), "no connection was on it"


def test_gateways_are_replaced(sound: Controls) -> None:
    """Each new one listens before an old one goes; that one answers what it has taken, however long it is."""
    until(lambda: len(sound.gateways()) == 2, "both gateways serve", BACK_WITHIN_S)
    old = set(sound.gateways())
    with load(sound) as running:
        sound.ask("update", within_s=BACK_WITHIN_S)
        until(
            lambda: len(sound.gateways()) == 2 and not old & set(sound.gateways()),
            "all are new",
            BACK_WITHIN_S,
        )
        until(lambda: all(gone(pid) for pid in old), "the old ones are gone", BACK_WITHIN_S)
    broken = [outcome for outcome in running.outcomes if outcome.broken]
    print(f"{len(broken)} connections broke before they were answered")
    assert not any(outcome.tokens for outcome in broken), "an answer was cut short"


# -- at random ---------------------------------------------------------------------------------------


def test_faults_at_random(sound: Controls, model: Path) -> None:
    """The short run of `make chaos`; clients abort and read slowly, too."""
    kinds = ("damage", "lost", "gateway", "worker", "stage", "raylet")
    parameters = Parameters(str(model), seed=11, requests=700, at_once=16, pause_s=2.0, kinds=kinds)
    report = strike(sound, parameters, print)
    print(
        report.faults, f"{report.broken} connections broke; {report.settled_s:.1f} s until nothing was left"
    )
    assert not report.wrong
    assert report.answered + report.left == parameters.requests
    assert report.left > parameters.requests * parameters.aborted / 2
    assert sum(report.faults.values()) >= 3


# -- a node dies, and workers ------------------------------------------------------------------------


def test_nothing_is_lost_when_workers_and_a_node_are_killed(sound: Controls) -> None:
    with load(sound) as running:
        for kill in (
            lambda: sound.kill("prefill-0", "ray::FaultyWorker"),
            lambda: sound.kill("decode-0", "ray::FaultyWorker"),
            lambda: sound.kill("decode-1", "/raylet"),
        ):
            answered = running.answered()
            pid = kill()
            until(lambda pid=pid: gone(pid), "it is dead")  # type: ignore[misc]
            until(lambda answered=answered: running.answered() > answered + AT_ONCE, "requests go on")  # type: ignore[misc]
        back = {*PREFILL, *DECODE}
        until(lambda: back <= sound.alive(), "killed workers and the node are back", BACK_WITHIN_S)
