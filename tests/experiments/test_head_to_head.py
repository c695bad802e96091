"""`handoff experiment head-to-head`: what follows from figures, the ways, resuming, and it all for real."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import head, head_run, head_users, head_ways
from experiments.compare import compare
from experiments.head import ALONE, ENCODINGS, ONE, OURS, PHASES, PICKLE, SEVERAL, STORE, WAYS
from experiments.head_run import HeadError, Parameters, measure
from experiments.head_users import Asked
from experiments.models import make
from experiments.report import page, read
from experiments.results import Run, check, load, save
from handoff.cli import app
from kv.errors import TransferError
from kv.tcp import TcpTransport

torch = pytest.importorskip("torch")
KV = 109_000_000


def request(case: str, ttft: float, link: str = "10 Gbit/s", **phases: float) -> dict[str, Any]:
    moved = {**dict.fromkeys(PHASES, 0.0), **phases}
    return {
        "cell": f"{link}: {case}, 871 tokens",
        "what": "request",
        "case": case,
        "link": link,
        "prompt_tokens": 871,
        "output_tokens": 257,
        "kv_bytes": 0 if case in ALONE else KV,
        "phases_s": moved,
        "ttft_s": ttft,
        "decode_s": 25.6,
    }


def users(way: str, how: str, seconds: float) -> dict[str, Any]:
    case = f"{way}, {how}"
    cell = f"10 Gbit/s: {case}, 16 users"
    return {
        "cell": cell,
        "what": "users",
        "case": case,
        "link": "10 Gbit/s",
        "users": 16,
        "kv_bytes": 10**7,
        "seconds": seconds,
    }


def encoding(case: str, decode_s: float) -> dict[str, Any]:
    return {
        "cell": f"encoding: {case}",
        "what": "encoding",
        "case": case,
        "encode_s": 0.1,
        "decode_s": decode_s,
        "bytes": KV,
    }


PUBLISHED = [
    {
        "cell": "10 Gbit/s: iperf3 x1",
        "what": "iperf3",
        "case": "iperf3 x1",
        "link": "10 Gbit/s",
        "streams": 1,
        "gbit_s": 37.6,
    },
    request("alone 0", 1.4, prefill=1.3),
    request("alone 1", 1.5, prefill=1.4),
    request(PICKLE, 7.553, prefill=5.389, encode=0.093, network=0.572, decode_bytes=1.37),
    request(
        STORE,
        6.642,
        prefill=3.62,
        to_host=0.122,
        encode=0.106,
        network=1.261,
        decode_bytes=0.012,
        to_device=1.424,
    ),
    request(OURS[0], 1.6, prefill=1.4, network=0.029),
    encoding(ENCODINGS[0], 1.37),
    encoding(ENCODINGS[3], 0.012),
    encoding(ENCODINGS[5], 0.012),
    *(users(way, how, seconds) for way in head.USER_WAYS for how, seconds in ((ONE, 2.0), (SEVERAL, 1.0))),
]


def told(samples: list[dict[str, Any]]) -> list[head.Conclusion]:
    return head.conclusions(head.rows(samples), head.encoding_rows(samples), head.user_rows(samples))


def test_the_published_figures_bear_out_the_published_conclusions() -> None:
    found = told(PUBLISHED)
    assert len(found) == 5
    assert all(one.holds for one in found)
    by = {row["case"]: row for row in head.rows(PUBLISHED)}
    for way in (PICKLE, STORE):
        mine = head.sums(by[way])
        for name, figure in head.PUBLISHED[way].items():
            if figure is not None and name not in ("total", "tokens_s"):
                assert mine[name] == pytest.approx(figure, rel=0.001), (way, name)
    assert by[PICKLE]["network_share"] == pytest.approx(KV * 8 / 0.572 / 37.6e9, abs=1e-4)
    assert by["alone 1"]["transfer_share"] is None


def test_what_is_otherwise_does_not_hold() -> None:
    fast = [one for one in PUBLISHED if one["case"] not in WAYS]
    fast += [request(way, 0.5, prefill=0.4, network=0.1) for way in WAYS]
    fast = [{**one, "seconds": 1.0} if one["what"] == "users" else one for one in fast]
    fast = [{**one, "decode_s": 1.0} if one["what"] == "encoding" else one for one in fast]
    assert [one.holds for one in told(fast)] == [False] * 4 + [True]


def test_from_when_on_it_pays() -> None:
    (one,) = head.break_even(head.rows(PUBLISHED))
    assert one["best"] == OURS[0]
    assert one["speedup"] == round(1.4 / (1.4 - 0.029), 2)
    share = KV * 8 / 0.029 / 37.6e9
    assert one["gbit_s_for_twice"] == pytest.approx(KV * 8 / 0.7 / 1e9 / share, rel=0.01)
    slow = [one for one in PUBLISHED if one["case"] not in OURS]
    (one,) = head.break_even(head.rows(slow))
    assert one["speedup"] is None
    assert "don't" in head.recommendation(head.rows(slow), [one])[0]


@pytest.fixture
def tensors() -> list[Any]:
    torch.manual_seed(1)
    return [torch.randn(1, 4, 300, 64).to(torch.bfloat16) for _ in range(12)]


@pytest.mark.parametrize("name", [name for name in ENCODINGS if not name.startswith("ray")])
def test_an_encoding_gives_back_what_went_in(
    name: str, tensors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = head_ways.encoded(name, tensors)
    assert found["bytes"] >= sum(one.nbytes for one in tensors)
    right = head_ways._decode

    def damaged(name: str, data: Any) -> Any:
        parts = [
            torch.as_tensor(np.array(part)) if not torch.is_tensor(part) else part.clone()
            for part in right(name, data)
        ]
        parts[3].view(torch.uint8).reshape(-1)[7] ^= 1
        return parts if name in ENCODINGS[:2] else [part.numpy() for part in parts]

    monkeypatch.setattr(head_ways, "_decode", damaged)
    with pytest.raises(RuntimeError, match="not what was encoded"):
        head_ways.encoded(name, tensors)


@pytest.mark.parametrize("name", [PICKLE, OURS[0]])
def test_a_way_brings_the_same_tensors(name: str, tensors: list[Any]) -> None:
    one, other = Pipe()
    receiver = head_ways.make(name, "127.0.0.1", "", b"k" * 32, other)
    sender = head_ways.make(name, "127.0.0.1", f"127.0.0.1:{receiver.port}", b"k" * 32, one)
    with closing(receiver), closing(sender), ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            waiting = pool.submit(receiver.receive, "cpu")
            sent = sender.send(tensors)
            got = waiting.result(30)
            assert all(torch.equal(a, b) for a, b in zip(tensors, got.tensors, strict=True))
            assert got.at > sent.at
            assert (sent.to_host_s, got.to_device_s) == (0.0, 0.0)  # there is no device


class Spoiling(TcpTransport):
    def fetch(self, ticket: Any, into: Any, timeout_s: float) -> None:
        super().fetch(ticket, into, timeout_s)
        into[0][5] ^= 1


def test_damage_on_the_way_is_an_error(tensors: list[Any]) -> None:
    one, other = Pipe()
    sender = head_ways.Ours(TcpTransport("127.0.0.1", b"k" * 32), one, near=False)
    receiver = head_ways.Ours(Spoiling("127.0.0.1", b"k" * 32), other, near=False)
    with closing(receiver), closing(sender), ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, tensors)
        with pytest.raises(TransferError, match="damaged"):
            receiver.receive("cpu")
        other.send_bytes(b"k")
        sending.result(30)


@pytest.mark.parametrize("way", head.USER_WAYS)
@pytest.mark.parametrize("apart", [False, True], ids=[ONE, SEVERAL])
def test_users_at_once(way: str, apart: bool) -> None:
    one, other = Pipe()
    asked = Asked(way, 3, apart, 1 << 20, True)
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(head_users.one_end, replace(asked, sends=sends), side, "127.0.0.1", b"k" * 32)
            for sends, side in ((True, one), (False, other))
        ]
        began, done = (end.result(60) for end in ends)
    assert done > began


def test_users_whose_kv_is_damaged_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_users, "_transport", lambda asked, address, key: Spoiling(address, key))
    one, other = Pipe()
    asked = Asked(OURS[0], 1, False, 1 << 20, True)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(head_users.one_end, asked, one, "127.0.0.1", b"k" * 32)
        receiving = pool.submit(
            head_users.one_end, replace(asked, sends=False), other, "127.0.0.1", b"k" * 32
        )
        with pytest.raises(TransferError, match=r"1 of 1 users failed.*damaged"):
            receiving.result(60)


class Recorder:
    """Stands in for nodes that run, and notes what they are asked."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.asked: list[str] = []
        self.interrupted_at = interrupted_at

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, cell: head.Cell) -> dict[str, Any]:
        self.asked.append(cell.name)
        if len(self.asked) == self.interrupted_at:
            raise KeyboardInterrupt
        if cell.what == "request":
            made = request(cell.case, 1.0, prefill=0.9, network=0.1)
            return {name: made[name] for name in made if name not in ("cell", "what", "case")} | {
                "link": head.link_name(cell.gbit_s),
                "prompt_tokens": cell.prompt,
            }
        return {
            "link": head.link_name(cell.gbit_s),
            "streams": 1,
            "gbit_s": 1.0,
            "users": cell.users,
            "kv_bytes": 10**6,
        } | {
            "seconds": 0.1,
            "encode_s": 0.1,
            "decode_s": 0.1,
            "bytes": 10**6,
        }


def test_an_interrupted_experiment_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, wanted = tmp_path / "out.json", Parameters("model", (40,), 4, (None,), (2,), 1, 2)
    recorders: list[Recorder] = []

    def nodes(*_: object) -> Recorder:
        recorders.append(Recorder(None if recorders else 9))
        return recorders[-1]

    monkeypatch.setattr(head_run, "_nodes", nodes)
    with pytest.raises(KeyboardInterrupt):
        measure(wanted, out, print)
    assert len(load(out).samples) == 8
    run = measure(wanted, out, print)
    asked = [*recorders[0].asked[:8], *recorders[1].asked]
    assert {asked.count(name) for name in asked} == {2}
    iperf = head_run.shutil.which("iperf3") is not None
    assert {*asked} == {cell.name for cell in head.cells((None,), (40,), (2,), iperf)}
    assert measure(wanted, out, print).results == run.results  # nothing is brought up
    assert len(recorders) == 2
    check(out)
    other = measure(replace(wanted, tokens=5), out, print)
    assert other.parameters["tokens"] == 5
    assert recorders[-1].asked.count(recorders[-1].asked[0]) == 2


def test_mistakes_name_the_option_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HeadError, match="--prompt is 1"):
        measure(Parameters("model", (1,)), tmp_path / "out.json", print)
    monkeypatch.setattr(head_run.netns, "missing", lambda: "network namespaces need root")
    with pytest.raises(HeadError, match="need root; or give --local"):
        measure(Parameters("model"), tmp_path / "out.json", print)
    result = CliRunner().invoke(
        app, ["experiment", "head-to-head", "--model", str(tmp_path), "--device", "tpu"]
    )
    assert isinstance(result.exception, HeadError)
    assert "--device is 'tpu'; there is: cpu" in str(result.exception)


def test_a_run_is_drawn_and_compared(tmp_path: Path) -> None:
    run = Run.begin("head-to-head", head_run.asdict(Parameters("model", users=(16,), links=(10.0,))))
    save(head_run._with(run, PUBLISHED, []), tmp_path / "head-to-head.json")
    check(tmp_path / "head-to-head.json")
    assert {one.finding for one in compare(*[tmp_path / "head-to-head.json"] * 2).rows} == {"too few samples"}
    text = page(read([tmp_path / "head-to-head.json"]))
    assert "2035 ms" in text  # published, and measured beside it:
    assert "10 Gbit/s, 871 tokens: 2035 ms" in text
    assert "handoff tcp is the fastest way (29 ms)" in text


@pytest.mark.experiment
def test_all_of_it_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback, with a real model, two Ray nodes and every way; answers are compared inside."""
    pytest.importorskip("transformers")
    model = make(tmp_path / "tiny", "tiny", lambda _: None)
    monkeypatch.setattr(head_run.shutil, "which", lambda _: None)  # iperf3 takes a second each
    wanted = Parameters(str(model), (70,), 3, (None,), (), 1, 1)
    said: list[str] = []
    run = measure(wanted, tmp_path / "out.json", said.append)
    by = {row["case"]: row for row in run.results["rows"]}
    assert by.keys() == {*ALONE, *WAYS}
    for way in WAYS:
        assert by[way]["kv_bytes"] >= 69 * 8192
        assert by[way]["phases_ms_p50"]["network"] > 0
    assert {one["case"] for one in check(tmp_path / "out.json").results["not_measured"]} == {
        "iperf3",
        "links",
        "copies between device and host",
    }


def test_a_wrong_answer_is_an_error() -> None:
    nodes = head_run._Nodes.__new__(head_run._Nodes)
    nodes._parameters, nodes._prompts, nodes._right = (
        Parameters("model", tokens=2),
        {3: [20, 21, 22]},
        {3: [7, 8]},
    )
    found = {"began": 0.0, "filled": 1.0, "first_at": 2.0, "done_at": 3.0, "ids": [7, 9]}
    nodes._clients = [lambda *_: found, lambda *_: found]  # type: ignore[list-item]
    with pytest.raises(HeadError, match="alone 1, 3 tokens: the answer is not that of one node alone"):
        nodes._request("alone 1", 3)
