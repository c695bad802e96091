"""An experiment as a job of the Ray cluster that it runs on: `python -m experiments.on_cluster CLUSTER_FILE`.

CLUSTER_FILE is the file's content as JSON. Serves its model on the cluster's nodes, asks for completions of
several lengths one after the other, and prints what was measured, with each request's way, as a line of JSON.
`k8s/experiment` runs it as a RayJob.
"""

import json
import random
import sys
from statistics import median
from typing import Any, Final

import ray

from actors.peers import NAMESPACE
from cluster.file import ClusterFile
from cluster.nodes import wait_for_nodes
from deployments.app import serving
from experiments.client import Client

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


def main() -> None:
    """Run it. Raises what bringing the application up raises: the job has failed then."""
    file = ClusterFile.model_validate_json(sys.argv[1])
    ray.init(namespace=NAMESPACE, log_to_driver=False)
    wait_for_nodes(file, print, PODS_S)
    url = f"http://127.0.0.1:{file.gateway.port}"  # jobs run on the head, as the gateway does
    with serving(file, print) as running, Client(url, running.model) as client:
        print(json.dumps({"experiment": file.name, "rows": measure(client)}), flush=True)


if __name__ == "__main__":
    main()
