"""The energy of the device that an engine computes on, by a counter of the GPU (NVML) or the CPU (RAPL).

A device's watts at rest, while it computes prompts and while it decodes make joules of the seconds that
workers spend in each kind of step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, Protocol

from experiments.results import versions
from experiments.simulate import Busy

Phase = Literal["idle", "prefill", "decode"]
POWERCAP: Final = "class/powercap"
TOPOLOGY: Final = "devices/system/cpu"
PACKAGE: Final = "topology/physical_package_id"


class EnergyError(RuntimeError):
    """A device's energy cannot be told; the message says why, and what to do about it."""


class Counter(Protocol):
    """What a device has used.

    Attributes:
        source: nvml or rapl.
        device: its name.
        share: of the device's rest that one worker is counted with.

    """

    source: str
    device: str
    share: float

    def joules(self) -> float:
        """Return the energy since a fixed moment; raises ``EnergyError``."""


@dataclass(frozen=True, slots=True)
class Watts:
    """A device's power at rest, while it computes prompts and while it decodes; else as ``Counter``."""

    source: str
    device: str
    share: float
    idle_w: float
    prefill_w: float
    decode_w: float

    def joules(self, busy: Busy, workers: int, seconds: float) -> float:
        """Return what workers use for a load: at rest, until all is answered, and what steps add."""
        rest = self.idle_w * self.share * workers * max(seconds, busy.until)
        prefill = (self.prefill_w - self.idle_w) * busy.prefill_s
        decode = (self.decode_w - self.idle_w) * busy.decode_s
        return rest + prefill + decode


class Rapl:
    """Package and DRAM of a CPU, from Linux' powercap; the kernel has AMD's under the same names."""

    source = "rapl"

    def __init__(self, cpu: int, root: Path = Path("/sys")) -> None:
        package = _text(root / TOPOLOGY / f"cpu{cpu}" / PACKAGE)
        cpus = (root / TOPOLOGY).glob(f"cpu[0-9]*/{PACKAGE}")  # those that are on
        self.share = 1 / sum(_text(one) == package for one in cpus)
        self.device = f"package-{package}"
        self._zones: list[Path] = []
        for zone in sorted((root / POWERCAP).glob("intel-rapl:*")):  # not intel-rapl-mmio: the same again
            name = _text(zone / "name")
            if name == self.device or name.startswith(f"{self.device}-die-"):
                drams = [one for one in zone.parent.glob(f"{zone.name}:*") if _text(one / "name") == "dram"]
                self._zones += [zone, *sorted(drams)]
        if not self._zones:
            raise EnergyError(
                f"{root / POWERCAP} has no RAPL counter of {self.device}: virtual machines have none, "
                "elsewhere: modprobe intel_rapl_msr"
            )
        self._range = {zone: int(_text(zone / "max_energy_range_uj")) for zone in self._zones}
        self._last = {zone: _microjoules(zone) for zone in self._zones}
        self._joules = 0.0

    def joules(self) -> float:
        """Return the energy since the start. Counters wrap after minutes of full load: ask more often."""
        for zone in self._zones:
            now = _microjoules(zone)
            self._joules += (now - self._last[zone]) % self._range[zone] / 1e6
            self._last[zone] = now
        return self._joules


class Nvml:
    """A GPU's whole board, from Volta on; ``nvml`` is the module ``pynvml``."""

    source = "nvml"
    share = 1.0

    def __init__(self, visible: str, nvml: Any) -> None:
        """Take the first of ``CUDA_VISIBLE_DEVICES``, where vLLM puts its only rank."""
        self._nvml = nvml
        first = visible.split(",")[0].strip() or "0"
        number = first.isdecimal()
        self._which = f"GPU {first}"
        try:
            nvml.nvmlInit()
            by = nvml.nvmlDeviceGetHandleByIndex if number else nvml.nvmlDeviceGetHandleByUUID
            self._handle = by(int(first) if number else first)
            self.device = str(nvml.nvmlDeviceGetName(self._handle))
        except nvml.NVMLError as error:
            raise EnergyError(
                f"NVML has no {self._which}: {error}; nvidia-smi -L shows what it has"
            ) from error
        self.joules()

    def joules(self) -> float:
        """Return the energy since the driver was loaded."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError as error:
            remedy = "GPUs before Volta, parts of one (MIG) and some virtual ones have no counter of energy"
            raise EnergyError(f"NVML, energy of {self._which}: {error}; {remedy}") from error


def counter(cpu: int) -> Counter:
    """Return the counter of what the installed vLLM computes on: the GPU, or the package of a CPU."""
    if "cpu" in versions().get("vllm", "cpu"):
        return Rapl(cpu)
    try:
        import pynvml
    except ImportError as error:
        raise EnergyError("nvidia-ml-py is not installed: pip install nvidia-ml-py") from error
    return Nvml(os.environ.get("CUDA_VISIBLE_DEVICES", ""), pynvml)


def sample(of: Counter, phase: Phase, work: Callable[[], object]) -> dict[str, Any]:
    """Return the joules and seconds that a piece of work took."""
    began, before = time.monotonic(), of.joules()
    work()
    used = of.joules() - before
    return {"what": "energy", "phase": phase, "joules": round(used, 3), "seconds": time.monotonic() - began}


def watts(of: Counter, samples: Sequence[Mapping[str, Any]]) -> Watts:
    """Return the medians of samples; raises ``EnergyError`` if computing does not show in them."""

    def p50(phase: Phase) -> float:
        own = [one["joules"] / one["seconds"] for one in samples if one.get("phase") == phase]
        return float(round(median(own), 3))

    idle, prefill, decode = p50("idle"), p50("prefill"), p50("decode")
    if idle >= min(prefill, decode):
        raise EnergyError(
            f"{of.device} took {idle:.1f} W at rest, {prefill:.1f} W in prefill, {decode:.1f} W in decode: "
            "something else keeps it busy; measure again when it is quiet"
        )
    return Watts(of.source, of.device, of.share, idle, prefill, decode)


def power_told(energy: Mapping[str, Any]) -> str:
    """Return a line on a run's power, or on why it has none."""
    watts = energy["watts"]
    if watts is None:
        return f"no energy: {energy['missing']}"
    return (
        f"{watts['device']} ({watts['source'].upper()}) takes {watts['idle_w']:.1f} W at rest, "
        f"{watts['prefill_w']:.1f} W in prefill, {watts['decode_w']:.1f} W in decode; a worker counts with "
        f"{watts['share']:.3g} of the rest"
    )


def joules_told(row: Mapping[str, Any]) -> str:
    """Return a row's joules by request in time, with their interval."""
    middle, bounds = row.get("joules_per_request_p50"), row.get("joules_per_request_ci95")
    interval = "" if bounds is None else f" ({bounds[0]:.1f} to {bounds[1]:.1f})"
    return "–" if middle is None else f"{middle:.1f}{interval}"


def _microjoules(zone: Path) -> int:
    return int(_text(zone / "energy_uj"))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except PermissionError as error:
        raise EnergyError(
            f"{path} is readable by root only (CVE-2020-8694): sudo chmod a+r {path}, until the next start, "
            "or run as root"
        ) from error
    except OSError as error:
        raise EnergyError(f"{path} cannot be read: {error.strerror}; no RAPL here") from error
