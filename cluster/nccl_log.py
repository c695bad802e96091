"""What a log of NCCL (`NCCL_DEBUG=INFO`) proves of GPUDirect RDMA.

A loaded kernel module proves nothing: NCCL decides for each channel whether the network card reads and writes
GPU memory, and says so in the line of the channel: `... [send] via NET/IB/0/GDRDMA`. Without `GDRDMA`, bytes
are staged in host memory.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_CHANNEL: Final = re.compile(r"\[(?:send|receive)\] via (NET/.*\S)")
_DISABLED: Final = re.compile(r"GPU Direct RDMA Disabled.*\S")


@dataclass(frozen=True)
class NcclLog:
    """Ways of channels between nodes: with GPUDirect RDMA, without; and NCCL's own words on why not."""

    direct: tuple[str, ...]
    staged: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def proves(self) -> bool:
        """All channels between nodes used GPUDirect RDMA, and there was one."""
        return bool(self.direct) and not self.staged


def read(texts: Iterable[str]) -> NcclLog:
    """The channels of all logs of one run."""
    ways, reasons = list[str](), dict[str, None]()
    for text in texts:
        ways += _CHANNEL.findall(text)
        reasons |= dict.fromkeys(_DISABLED.findall(text))
    direct = tuple(way for way in ways if "GDRDMA" in way)
    return NcclLog(direct, tuple(way for way in ways if "GDRDMA" not in way), tuple(reasons))
