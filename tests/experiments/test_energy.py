"""Energy: RAPL from a tree of files, NVML from a module with its functions, and joules counted by hand."""

import contextlib
import inspect
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from actors.steps import StepModel
from experiments import energy, verdict_engine
from experiments import verdict as verdict_module
from experiments.energy import EnergyError, Nvml, Rapl, Watts, counter
from experiments.simulate import Plant, simulate, simulated
from experiments.verdict import Parameters, judged, verdict
from experiments.workload import MIXES, Arrival, arrivals

RANGE = 262143328850
"""Microjoules, of a package as Linux has it; 65712999613 of its DRAM."""
ZONES = {
    "intel-rapl:0": ("package-0", 1_000_000, RANGE),
    "intel-rapl:0:0": ("core", 500_000, RANGE),
    "intel-rapl:0:1": ("dram", 65_712_000_000, 65712999613),
    "intel-rapl:1": ("package-1", RANGE - 2_000_000, RANGE),
    "intel-rapl:1:0": ("dram", 0, 65712999613),
    "intel-rapl:2": ("psys", 7_000_000, RANGE),
    "intel-rapl-mmio:0": ("package-0", 3_000_000, RANGE),
}


@pytest.fixture
def sys_tree() -> Iterator[Path]:
    """Six CPUs in two packages, one CPU off; the counters of `ZONES`. Anybody may look into the folder."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    for cpu in range(6):
        folder = root / energy.TOPOLOGY / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{int(cpu >= 4)}\n")
    (root / energy.TOPOLOGY / "cpu6").mkdir()
    for zone, (name, used, most) in ZONES.items():
        folder = root / energy.POWERCAP / zone
        folder.mkdir(parents=True)
        for file, value in (("name", name), ("energy_uj", used), ("max_energy_range_uj", most)):
            (folder / file).write_text(f"{value}\n")
    yield root
    shutil.rmtree(root)


def use(root: Path, zone: str, microjoules: int) -> None:
    file = root / energy.POWERCAP / zone / "energy_uj"
    most = int((file.parent / "max_energy_range_uj").read_text())
    file.write_text(f"{(int(file.read_text()) + microjoules) % most}\n")


def test_a_package_is_read_with_its_memory_and_nothing_twice(sys_tree: Path) -> None:
    rapl = Rapl(3, sys_tree)
    assert (rapl.device, rapl.share) == ("package-0", 1 / 4)
    for zone in ZONES:
        use(sys_tree, zone, 1_000_000 if zone != "intel-rapl:0" else 5_000_000)
    assert rapl.joules() == pytest.approx(6.0)  # package 5, its DRAM 1, which wraps


def test_the_other_package_wraps_more_than_once(sys_tree: Path) -> None:
    rapl = Rapl(5, sys_tree)
    assert (rapl.device, rapl.share) == ("package-1", 1 / 2)
    for turn in (1, 2, 3):
        use(sys_tree, "intel-rapl:1", 200_000_000_000)
        assert rapl.joules() == pytest.approx(turn * 200_000)


def test_dies_of_a_package_are_summed(sys_tree: Path) -> None:
    for zone, name in (("intel-rapl:0", "package-0-die-0"), ("intel-rapl:1", "package-0-die-1")):
        (sys_tree / energy.POWERCAP / zone / "name").write_text(f"{name}\n")
    rapl = Rapl(0, sys_tree)
    for zone in ("intel-rapl:0", "intel-rapl:1"):
        use(sys_tree, zone, 4_000_000)
    assert rapl.joules() == pytest.approx(8.0)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's right to read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_counter_that_only_root_may_read_says_how_to_read_it(sys_tree: Path) -> None:
    file = sys_tree / energy.POWERCAP / "intel-rapl:0" / "energy_uj"
    file.chmod(0o400 if os.geteuid() == 0 else 0)
    with as_nobody(), pytest.raises(EnergyError, match=r"CVE-2020-8694\): sudo chmod a\+r ") as said:
        Rapl(0, sys_tree)
    assert str(file) in str(said.value)


def test_a_machine_without_counters_says_so(sys_tree: Path) -> None:
    shutil.rmtree(sys_tree / energy.POWERCAP)
    with pytest.raises(EnergyError, match="no RAPL counter of package-0: virtual machines have none"):
        Rapl(0, sys_tree)
    with pytest.raises(EnergyError, match=r"cpu99.*cannot be read: No such file"):
        Rapl(99, sys_tree)


@pytest.mark.skipif(Path("/sys/class/powercap/intel-rapl:0").exists(), reason="this machine has RAPL")
def test_this_machine_has_no_counter() -> None:
    with pytest.raises(EnergyError, match="RAPL"):
        counter(min(os.sched_getaffinity(0)))


def fake_nvml(**failing: Exception) -> Any:
    """Two GPUs; what is named in ``failing`` raises. Its functions are those of the real module."""
    uuids = ["GPU-aaaa", "GPU-bbbb"]
    used = [1_000_000, 2_000_000]

    def of(name: str, function: Any) -> Any:
        def called(*arguments: Any) -> Any:
            inspect.signature(getattr(pynvml, name)).bind(*arguments)
            if name in failing:
                raise failing[name]
            return function(*arguments)

        return called

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": uuids.index,
        "nvmlDeviceGetName": lambda handle: f"NVIDIA H200 number {handle}",
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: used[handle],
    }
    module = SimpleNamespace(**{name: of(name, one) for name, one in functions.items()})
    module.NVMLError, module.used = pynvml.NVMLError, used
    return module


@pytest.mark.parametrize(("visible", "number"), [("", 0), ("1,0", 1), ("GPU-bbbb", 1), (" 0", 0)])
def test_the_gpu_that_is_visible_first_is_read(visible: str, number: int) -> None:
    nvml = fake_nvml()
    gpu = Nvml(visible, nvml)
    before = gpu.joules()
    nvml.used[number] += 2500
    nvml.used[1 - number] += 99_000
    assert gpu.joules() - before == pytest.approx(2.5)
    assert (gpu.device, gpu.share, gpu.source) == (f"NVIDIA H200 number {number}", 1.0, "nvml")


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "NVML has no GPU 0: Driver Not Loaded; nvidia-smi"),
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_INVALID_ARGUMENT, "has no GPU 0: Invalid Argument"),
        (
            "nvmlDeviceGetTotalEnergyConsumption",
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            r"energy of GPU 0: Not Supported; .*MIG",
        ),
    ],
)
def test_what_nvml_cannot_do_is_said(name: str, code: int, said: str) -> None:
    with pytest.raises(EnergyError, match=said):
        Nvml("0", fake_nvml(**{name: pynvml.NVMLError(code)}))


@pytest.mark.parametrize(
    ("build", "there", "said"),
    [("0.32.0", True, "NVIDIA H200 number 1"), ("0.32.0", False, "pip install nvidia-ml-py")],
)
def test_the_build_of_vllm_says_which_counter(
    build: str, there: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "versions", lambda: {"vllm": build})
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake_nvml() if there else None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    if there:
        assert counter(0).device == said
    else:
        with pytest.raises(EnergyError, match=said):
            counter(0)


class Meter:
    """Counts what it is told."""

    source, device, share = "rapl", "package-0", 0.25

    def __init__(self) -> None:
        self.used = 0.0

    def joules(self) -> float:
        return self.used


def test_each_phase_is_measured_on_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine alone is not real: a request of so many prompt tokens adds joules to the counter."""
    meter, asked, used = Meter(), [], {1: 8.0, 128: 0.25}

    class Client:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *_: object) -> None: ...
        def complete(self, prompt: list[int], tokens: int, name: str) -> None:
            asked.append((len(prompt), tokens))
            meter.used += used[tokens]
            time.sleep(0.01)

    monkeypatch.setattr(verdict_engine, "Client", Client)
    monkeypatch.setattr(verdict_engine, "ENERGY_S", 0.05)
    monkeypatch.setattr(energy, "counter", lambda _: meter)
    server: Any = SimpleNamespace(url="", model="")
    samples, watts, missing = verdict_engine._watts(0, server, lambda n: [1] * n, lambda _: None)
    assert missing is None
    assert watts is not None
    assert {*asked} == {(2048, 1), (64, 128)}
    assert [one["phase"] for one in samples] == ["idle", "prefill", "decode"] * verdict_engine.REPEATS
    for phase, tokens in (("idle", 0), ("prefill", 1), ("decode", 128)):
        joules = sum(one["joules"] for one in samples if one["phase"] == phase)
        assert joules == sum(used[of] for _, of in asked if of == tokens)
    assert watts.idle_w == 0
    assert min(watts.prefill_w, watts.decode_w) > 0
    assert (watts.source, watts.device, watts.share) == ("rapl", "package-0", 0.25)
    used.update({1: 0.0})  # not to be told from rest
    _, watts, missing = verdict_engine._watts(0, server, lambda n: [1] * n, lambda _: None)
    assert watts is None
    assert "something else keeps it busy" in (missing or "")


def test_watts_are_medians() -> None:
    used = {"idle": (10, 30, 20), "prefill": (100, 90, 300), "decode": (60, 50, 70)}
    samples = [
        {"phase": phase, "joules": joules * 2.0, "seconds": 2.0}
        for phase, all_of in used.items()
        for joules in all_of
    ]
    assert energy.watts(Meter(), samples) == Watts("rapl", "package-0", 0.25, 20, 100, 60)


STEP = StepModel(0.01, 0.001, 1e-4, 0.0, 0.0)
PLANT = Plant(1, 1, STEP, chunk=512, kv_bytes=1000, handover_s=0.01, link_rate=1e8)
WATTS = Watts("nvml", "GPU", 1.0, idle_w=10, prefill_w=110, decode_w=60)
PREFILL_S = (0.01 + 0.0512) + (0.01 + 0.0488)
"""Of 1000 prompt tokens, 512 at most in a step."""
DECODE_S = 2 * (0.01 + 0.001)
"""Of the second and the third token."""
ARRIVES_S = PREFILL_S + 0.00512 + 0.01
"""KV at decode: the last chunk is sent after prefill, then the handover."""


def test_busy_seconds_are_told_by_kind_of_step() -> None:
    one = [Arrival(0.0, 1000, 3)]
    whole, split = simulated(one, "replicas", PLANT)[1], simulated(one, "always", PLANT)[1]
    assert astuple(whole) == pytest.approx((PREFILL_S, DECODE_S, PREFILL_S + DECODE_S))
    assert astuple(split) == pytest.approx((PREFILL_S, DECODE_S, ARRIVES_S + DECODE_S))


def test_a_step_that_does_both_counts_as_prefill() -> None:
    load = [Arrival(0.0, 1000, 3, (1, 2)), Arrival(0.11, 100, 1, (3,))]
    plant = Plant(1, 0, STEP, chunk=512)
    mixed = 0.01 + 0.001 + 100 * 1e-4  # the second token of the first, and all of the second prompt
    busy = simulated(load, "replicas", plant)[1]
    assert astuple(busy) == pytest.approx((PREFILL_S + mixed, DECODE_S / 2, PREFILL_S + mixed + DECODE_S / 2))


def test_counting_changes_nothing() -> None:
    load = arrivals(MIXES["bursty"], 8, 5, 3)
    assert simulate(load, "adaptive", PLANT) == simulated(load, "adaptive", PLANT)[0]


@pytest.mark.parametrize(("at", "share"), [(0.0, 1.0), (0.95, 1.0), (0.0, 0.25)])
def test_joules_of_a_good_request(at: float, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers for a second at 10 W, 0.12 s at 100 W more, 0.022 s at 50 W more: 20 + 12 + 1.1 J."""
    monkeypatch.setattr(verdict_module, "RATES", (0.5,))
    monkeypatch.setattr(verdict_module, "arrivals", lambda *_: [Arrival(at, 1000, 3)])
    asked = Parameters("m", mixes=("balanced",), ttft_ms=1000, tpot_ms=1000, seconds=1, loads=6)
    watts = Watts("nvml", "GPU", share, 10, 110, 60)
    found = judged(asked, STEP, PLANT, lambda _: None, watts)
    rows = {row["contender"]: row for row in found["rows"]}
    plain, split = rows["undivided"], rows["1p1d always"]
    lengths = [max(1, at + one + DECODE_S) for one in (PREFILL_S, ARRIVES_S)]
    for row, length in zip((plain, split), lengths, strict=True):
        expected = 20 * share * length + 100 * 0.12 + 50 * 0.022
        assert row["joules_per_request"] == [pytest.approx(expected, abs=1e-4)] * 6
        assert row["joules_per_request_p50"] == pytest.approx(expected, abs=1e-4)
        if not at and share == 1:
            assert row["joules_per_request_p50"] == 33.1
    (said,) = found["verdicts"]
    assert "times the energy per request" in said["answer"]


def test_a_load_without_a_request_in_time_has_no_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_module, "RATES", (0.5,))
    monkeypatch.setattr(verdict_module, "arrivals", lambda *_: [Arrival(0, 1000, 3)])
    asked = Parameters("m", mixes=("balanced",), ttft_ms=1, tpot_ms=1, seconds=1, loads=6)
    found = judged(asked, STEP, PLANT, lambda _: None, WATTS)
    assert [row["joules_per_request"] for row in found["rows"]] == [[None] * 6] * 3
    assert found["verdicts"][0]["energy_ratio"] is None
    assert "energy" not in found["verdicts"][0]["answer"]


def test_the_verdict_pairs_loads() -> None:
    def row(goodput: float, *joules: float | None) -> dict[str, Any]:
        return {
            "contender": "1p1d always",
            "goodput_rps_p50": goodput,
            "goodputs_rps": [goodput] * len(joules),
            "joules_per_request": list(joules),
        }

    plain, split = row(2, 10, 20, 30, 40, 50, 60, None), row(3, 9, 18, 27, 36, 45, 54, 1)
    said = verdict("balanced", {"undivided": plain, "1p1d always": split})
    assert (said["energy_ratio"], said["energy_ratio_ci95"]) == (0.9, [0.9, 0.9])
    assert said["answer"].endswith(
        "1.50 times (1.50 to 1.50), at 0.90 times the energy per request (0.90 to 0.90)"
    )
