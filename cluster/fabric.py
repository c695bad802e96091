"""What `handoff probe` found between nodes, as workers use it until they have measured themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from cluster.errors import ClusterFileError

KIND: Final = "probe"
RUNGS: Final = {"tcp": "tcp", "object store": "plasma", "nixl": "nixl"}
"""What a map calls a way between two nodes, and what KV's transports call it."""
MAKE: Final = "make it with `handoff probe FILE`, and leave the key `map` out of the file until then"
BETWEEN: Final = " > "
PUT: Final = "s3 put"
GET: Final = "s3 get"


class FabricMap(BaseModel):
    """A map's links between nodes, each in one direction.

    made: when, ISO 8601. gbit_s: by `SOURCE > TARGET`, then by transport; tcp with the best number of
    connections, s3 as the source's uploads followed by the target's downloads. round_trip_us: by
    `SOURCE > TARGET`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    made: str
    gbit_s: Mapping[str, Mapping[str, float]]
    round_trip_us: Mapping[str, float] = {}

    def nodes(self) -> set[str]:
        """Names of the nodes that it has links of."""
        return {node for way in self.gbit_s for node in way.split(BETWEEN)}

    def out_of(self, node: str) -> dict[str, dict[str, tuple[float, float]]]:
        """Return (seconds, seconds per byte) by target node and transport, of the links out of a node."""
        found = {}
        for way, rates in self.gbit_s.items():
            source, target = way.split(BETWEEN)
            if source == node:
                trip_s = self.round_trip_us.get(way, 0.0) / 1e6
                found[target] = {rung: (trip_s, 8e-9 / rate) for rung, rate in rates.items()}
        return found


def read(path: Path) -> FabricMap:
    """Read what `handoff probe` wrote; raises ClusterFileError if the file is something else."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ClusterFileError(f"map: {path} cannot be read ({error}); {MAKE}") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind != KIND:
        raise ClusterFileError(f"map: {path} is of kind {kind!r}, not a map; {MAKE}")
    try:
        return _of(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ClusterFileError(
            f"map: {path} has no links that this version can read ({error!r}); {MAKE}"
        ) from error


def _of(data: Mapping[str, Any]) -> FabricMap:
    ways: dict[str, dict[str, float]] = {}
    trips: dict[str, float] = {}
    puts: dict[str, float] = {}
    gets: dict[str, float] = {}
    for row in data["rows"]:
        what, source, target, value = row["what"], row["source"], row["target"], float(row["p50"])
        if target is None:
            if what in (PUT, GET):
                (puts if what == PUT else gets)[source] = value
            continue
        way = f"{source}{BETWEEN}{target}"
        if what == "round trip":
            trips[way] = value
        elif (rung := RUNGS.get(what)) is not None and value > 0:
            ways.setdefault(way, {})[rung] = max(ways.get(way, {}).get(rung, 0.0), value)
    for way, rates in ways.items():
        source, target = way.split(BETWEEN)
        if puts.get(source, 0) > 0 and gets.get(target, 0) > 0:
            rates["s3"] = 1 / (1 / puts[source] + 1 / gets[target])
    return FabricMap(made=str(data["started"]), gbit_s=ways, round_trip_us=trips)
