"""An experiment on the Ray cluster on whose head it runs: `python -m experiments.on_cluster NAME`.

The variable HANDOFF_CLUSTER_FILE holds the cluster file's content as JSON. Has Ray's autoscaler make the
nodes that are not there, measures, and prints what was measured as a line of JSON. `serving`: the model is
served on the nodes and asked for completions of several lengths one after the other; each request's way is
told. `placement`: the model moves between the nodes; the line is a recorded run, for `handoff report`.
`k8s/experiment` runs one as a RayJob; `k8s/experiments` is a cluster that stays, for many of them.
"""

import argparse
import contextlib
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import ray
from ray.autoscaler.sdk import request_resources

from actors.peers import NAMESPACE
from cluster.errors import NotRunningError
from cluster.file import ClusterFile
from cluster.kube import CLUSTER_FILE
from cluster.names import at
from cluster.nodes import wait_for_nodes
from cluster.pods import Experiment
from deployments.app import serving
from experiments.client import Client
from experiments.placement import MEDIA
from experiments.placement_cluster import measure_here

PODS_S: Final = 1800.0
PROMPT_TOKENS: Final = (128, 512, 1024)
OUTPUT_TOKENS: Final = 17
REPEATS: Final = 5
HIGHEST_ID: Final = 255
"""Every vocabulary has as many tokens."""


def measure(client: Client) -> list[dict[str, Any]]:
    """Ask, and return a row for each length: medians over `REPEATS` requests, after one to warm up."""
    ids, rows = random.Random(0), []
    for length in PROMPT_TOKENS:
        timings, paths = [], set()
        for repeat in range(-1, REPEATS):
            prompt = [ids.randint(3, HIGHEST_ID) for _ in range(length)]
            request_id = f"experiment-{length}-{repeat}"
            timing = client.complete(prompt, OUTPUT_TOKENS, request_id)
            record = client.record(request_id)
            if repeat >= 0:
                timings.append(timing)
                paths.add(f"{record['prefill_worker']}>{record['decode_worker']}")
        rows.append(
            {
                "prompt_tokens": length,
                "ttft_ms": round(median(timing.ttft_ms for timing in timings), 1),
                "requests": len(timings),
                "paths": sorted(paths),
            }
        )
    return rows


@contextlib.contextmanager
def nodes(file: ClusterFile) -> Iterator[None]:
    """Keep the file's nodes for as long as the block; the autoscaler makes those that are not there."""
    request_resources(bundles=[{at(node.name): 1} for node in file.each_node()])
    try:
        wait_for_nodes(file, print, PODS_S)
        yield
    finally:
        request_resources(bundles=[])


def serve(file: ClusterFile) -> dict[str, Any]:
    """Serve the file's model on its nodes, and return how long completions took."""
    url = f"http://127.0.0.1:{file.gateway.port}"  # this runs on the head, as the gateway does
    with serving(file, print) as running, Client(url, running.model) as client:
        return {"experiment": file.name, "rows": measure(client)}


def place(file: ClusterFile) -> dict[str, Any]:
    """Move the file's model between its nodes in every placement, and return the recorded run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "placement.json"
        return measure_here(file, file.name, None, REPEATS, MEDIA, out, print).as_json()


EXPERIMENTS: Final[Mapping[Experiment, Callable[[ClusterFile], dict[str, Any]]]] = {
    "serving": serve,
    "placement": place,
}


def main() -> None:
    """Run it. Raises what bringing the application up raises: the job has failed then."""
    parser = argparse.ArgumentParser(prog="python -m experiments.on_cluster")
    parser.add_argument("experiment", nargs="?", choices=[*EXPERIMENTS], default="serving")
    chosen: Experiment = parser.parse_args().experiment
    if (content := os.environ.get(CLUSTER_FILE)) is None:
        raise NotRunningError(f"{CLUSTER_FILE} is not set; run this on the head of k8s/experiment(s)")
    file = ClusterFile.model_validate_json(content)
    ray.init(namespace=NAMESPACE, log_to_driver=False)
    with nodes(file):
        print(json.dumps(EXPERIMENTS[chosen](file)), flush=True)


if __name__ == "__main__":
    main()
