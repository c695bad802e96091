"""`handoff experiment mesh`: what is counted, what follows, and a cluster on links for real."""

import itertools
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from cluster import netns
from experiments import mesh, mesh_run, mesh_tap
from experiments.compare import compare
from experiments.mesh import CHOICES, PAIRS, conclusions, divided, recommendation, since
from experiments.mesh_run import MeshError, Parameters, measure, slow
from experiments.models import make
from experiments.report import page, read
from experiments.results import Run, check, save
from handoff.cli import app

TOO_FEW_RIGHTS = netns.missing()
GATEWAY, PEER = "198.18.0.1", "198.18.0.3"


def test_what_was_silent_at_rest_carries_requests() -> None:
    before = {(1, GATEWAY, 2): (100, 4, 2), (3, GATEWAY, 4): (1000, 10, 10)}
    after = {(1, GATEWAY, 2): (700, 6, 5), (3, GATEWAY, 4): (1900, 30, 20), (5, GATEWAY, 6): (50, 1, 1)}
    counted = since(before, after)
    assert counted == {
        (1, GATEWAY, 2): (600, 2, 3),
        (3, GATEWAY, 4): (900, 20, 10),
        (5, GATEWAY, 6): (50, 1, 1),
    }
    quiet, above, total = divided(counted, {(1, GATEWAY, 2): (0, 0, 0), (3, GATEWAY, 4): (400, 8, 4)}, 2.0)
    assert quiet == {"bytes": 650, "turns": 3, "packets": 4}
    assert above == {"bytes": 100, "turns": 4, "packets": 2}
    assert total == {"bytes": 1550, "turns": 23, "packets": 14}


def traffic(
    prompt: int, tokens: int, through: int = 20_000, waits: int = 0, requests: int = 2
) -> dict[str, Any]:
    kv = prompt * 8192
    per = {
        PAIRS[0]: {"bytes": through, "turns": 4, "packets": 6},
        PAIRS[1]: {"bytes": 1000 + 60 * tokens, "turns": 4 + 2 * waits * tokens, "packets": 2 + tokens},
        PAIRS[2]: {"bytes": kv + 500, "turns": 8, "packets": 40},
    }
    many = {pair: {name: requests * count for name, count in counts.items()} for pair, counts in per.items()}
    return {
        "what": "traffic",
        "case": f"{prompt} tokens in, {tokens} out",
        "prompt_tokens": prompt,
        "output_tokens": tokens,
        "requests": requests,
        "kv_bytes": requests * kv,
        "of_requests": many,
        "services_above_rest": {pair: dict.fromkeys(mesh.COUNTS, 0) for pair in PAIRS},
        "total": many,
    }


def answered(case: str, total: float) -> dict[str, Any]:
    return {"what": "choice", "case": case, "ttft_s": total / 4, "tpot_s": total / 80, "total_s": total}


TIMES = dict(zip((choice.name for choice in CHOICES), (1.0, 1.1, 2.0, 1.5, 0.9, 3.0, 1.2), strict=True))
SAMPLES = [
    *(traffic(prompt, tokens) for prompt in (256, 2048) for tokens in (9, 65)),
    *(answered(name, total) for name, total in TIMES.items()),
]
LINKS = [{"node": "prefill-0", "received_bytes": 2_000_000, "sent_bytes": 10}]


def found(samples: list[dict[str, Any]], received: int = 2_000_000) -> list[bool]:
    links = [{**LINKS[0], "received_bytes": received}]
    return [
        one.holds
        for one in conclusions(mesh.traffic_rows(samples), links, 65_000_000, mesh.choice_rows(samples))
    ]


def test_a_tokens_part_is_the_difference_of_two_lengths() -> None:
    by = {(row["pair"], row["prompt_tokens"]): row for row in mesh.traffic_rows(SAMPLES)}
    row = by[PAIRS[1], 2048]
    assert (row["bytes_per_token"], row["bytes_per_request"]) == (60, 1000)
    assert (row["round_trips_per_token"], row["round_trips_per_request"]) == (0, 2)
    assert (row["packets_per_token"], row["packets_per_request"]) == (1, 2)
    assert by[PAIRS[2], 256]["total_bytes_per_request"] == 256 * 8192 + 500


def test_each_claim_falls_by_its_own_figures() -> None:
    assert found(SAMPLES) == [True] * 4
    assert found(SAMPLES, received=40_000_000) == [False, True, True, True]
    through = [traffic(one["prompt_tokens"], one["output_tokens"], 10_000_000) for one in SAMPLES[:4]]
    assert found([*through, *SAMPLES[4:]]) == [True, False, True, True]
    waiting = [traffic(one["prompt_tokens"], one["output_tokens"], waits=1) for one in SAMPLES[:4]]
    assert found([*waiting, *SAMPLES[4:]]) == [True, True, False, True]
    same = [answered(name, 1.0) for name in TIMES]
    assert found([*SAMPLES[:4], *same]) == [True, True, True, False]


def test_what_to_do_follows_the_times() -> None:
    told = recommendation(mesh.choice_rows(SAMPLES), 0.33)
    assert "first with: fast alone (900 ms" in told[0]
    assert "slow prefills, fast decodes (1500 ms against 2000 ms" in told[1]
    assert "1.20 times" in told[2]


def frame(payload: bytes, ports: tuple[int, int]) -> bytes:
    tcp = ports[0].to_bytes(2, "big") + ports[1].to_bytes(2, "big") + bytes(8) + b"\x80" + bytes(19) + payload
    size = (20 + len(tcp)).to_bytes(2, "big")
    ip = (
        b"\x45\x00"
        + size
        + bytes(5)
        + b"\x06"
        + bytes(2)
        + socket.inet_aton(GATEWAY)
        + socket.inet_aton(PEER)
    )
    return bytes(12) + b"\x08\x00" + ip + tcp


def test_a_packet_is_its_payload_and_direction() -> None:
    data = frame(b"x" * 1000, (80, 5000))
    assert mesh_tap.parsed(data[:134], len(data), outgoing=True) == ((80, PEER, 5000), 1000, 1)
    assert mesh_tap.parsed(data[:134], len(data), outgoing=False) == ((5000, GATEWAY, 80), 1000, 2)
    assert mesh_tap.parsed(frame(b"", (80, 5000)), 66, outgoing=True) is None  # an acknowledgement
    assert mesh_tap.parsed(data[:23] + b"\x11" + data[24:], len(data), outgoing=True) is None


@pytest.mark.skipif(TOO_FEW_RIGHTS is not None, reason=f"packets cannot be counted here: {TOO_FEW_RIGHTS}")
def test_a_tap_counts_what_a_connection_carries() -> None:
    tap = mesh_tap.Tap("lo")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            for _ in range(3):
                client.sendall(b"a" * 1000)
                assert len(server.recv(1000, socket.MSG_WAITALL)) == 1000
                server.sendall(b"b" * 10)
                assert len(client.recv(10, socket.MSG_WAITALL)) == 10
            mine = (client.getsockname()[1], "127.0.0.1", server.getsockname()[1])
            assert len(server.getpeername()) == 2
    counts = tap.counts()
    own = [counts[one] for one in (mine, (mine[2], mine[1], mine[0])) if one in counts]
    # The loopback shows each packet twice: as it leaves one end, and as it comes to the other.
    assert sum(bytes_ for bytes_, _, _ in own) == 2 * 3 * 1010
    assert all(turns >= 5 for _, turns, _ in own)


def test_a_slow_process_computes_less() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as running:
        try:
            process = psutil.Process(running.pid)
            with slow([process], 0.2):
                stopped = 0
                for _ in itertools.repeat(None, 100):
                    stopped += process.status() == psutil.STATUS_STOPPED
                    time.sleep(0.005)
            assert stopped > 10
            deadline = time.monotonic() + 5
            while process.status() == psutil.STATUS_STOPPED:
                assert time.monotonic() < deadline, "it was not let go"
        finally:
            running.kill()


def test_mistakes_name_the_option_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_run.netns, "missing", lambda: "network namespaces need root")
    with pytest.raises(MeshError, match="need root"):
        measure(Parameters("model"), tmp_path / "out.json", print)
    monkeypatch.setattr(mesh_run.netns, "missing", lambda: None)
    result = CliRunner().invoke(
        app,
        ["experiment", "mesh", "--model", str(tmp_path), "--tokens", "9", "9", "--out", str(tmp_path / "o")],
    )
    assert isinstance(result.exception, MeshError)
    assert "two different lengths" in str(result.exception)


class Recorder:
    links = LINKS

    def __init__(self, interrupted_at: int | None) -> None:
        self.asked: list[str] = []
        self.interrupted_at = interrupted_at

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, cell: mesh_run.Cell) -> dict[str, Any]:
        self.asked.append(cell.case)
        if len(self.asked) == self.interrupted_at:
            raise KeyboardInterrupt
        made = answered(cell.case, 1.0) if cell.choice else traffic(cell.prompt, cell.tokens)
        return {name: made[name] for name in made if name not in ("what", "case")}


def test_an_interrupted_experiment_goes_on_and_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_run.netns, "missing", lambda: None)
    recorders: list[Recorder] = []

    def serving(*_: object) -> Recorder:
        recorders.append(Recorder(None if recorders else 7))
        return recorders[-1]

    monkeypatch.setattr(mesh_run, "_serving", serving)
    (tmp_path / "model.safetensors").write_bytes(bytes(65_000_000))
    out, wanted = tmp_path / "mesh.json", Parameters(str(tmp_path), repeats=2)
    with pytest.raises(KeyboardInterrupt):
        measure(wanted, out, print)
    run = measure(wanted, out, print)
    asked = [*recorders[0].asked[:6], *recorders[1].asked]
    assert sorted(asked) == sorted(2 * [cell.case for cell in mesh_run.cells(wanted)])
    assert measure(wanted, out, print).results == run.results
    assert len(recorders) == 2
    assert len(check(out).results["conclusions"]) == 4
    assert {one.finding for one in compare(out, out).rows} == {"too few samples"}
    text = page(read([out]))
    assert "gateway - decode, 2048 tokens: 0.00" in text  # beside the published 7 and 290
    assert "slow prefills, fast decodes" in text


def test_a_run_without_figures_is_refused_by_the_schema(tmp_path: Path) -> None:
    save(Run.begin("mesh", asdict(Parameters("m"))).end({"rows": []}, SAMPLES), tmp_path / "mesh.json")
    with pytest.raises(ValueError, match="measure again"):
        check(tmp_path / "mesh.json")


@pytest.mark.skipif(TOO_FEW_RIGHTS is not None, reason=f"no hosts of their own here: {TOO_FEW_RIGHTS}")
@pytest.mark.experiment
def test_a_cluster_on_links_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real engines. Bytes are counted, so a busy machine does not change them."""
    monkeypatch.setattr(mesh_run, "CHOICES", CHOICES[3:5])
    model = make(tmp_path / "tiny", "tiny", lambda _: None)
    wanted = Parameters(str(model), prompts=(600,), answers=(3, 19), requests=1, repeats=1)
    run = measure(wanted, tmp_path / "mesh.json", print)
    holds = {one["claim"].partition(" (")[0]: one for one in run.results["conclusions"]}
    assert holds["KV goes from worker to worker, not through the gateway"]["holds"], holds
    assert holds["No token waits for a round trip between nodes"]["holds"], holds
    by = {row["pair"]: row for row in run.results["rows"]}
    assert by[PAIRS[2]]["kv_bytes"] >= 512 * 8192
    assert by[PAIRS[1]]["bytes_per_token"] > 0  # tokens do come through the gateway
    assert {row["choice"] for row in run.results["choices"]} == {CHOICES[3].name, CHOICES[4].name}
