"""Ray Serve LLM's own prefill/decode app, to hold against Handoff; runs in an environment with `ray[llm]`.

python examples/ray_serve_llm.py MODEL [PORT] [--leave]: one prefill and one decode worker, a CPU core each,
KV over NIXL, until Ctrl-C. --leave: NIXL's threads keep their priority. docs/router.md
has the environment and the load.
"""

import os
import signal
import sys

import psutil
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_pd_openai_app

BIND = "VLLM_CPU_OMP_THREADS_BIND"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
CPUS = 5
"""That Ray is told of: two for each worker and its replica, one for the ingress."""


def worker(model: str, core: int) -> LLMConfig:
    """Return what a worker is; on GPUs: no bundle of CPUs, and KV buffers on the device."""
    return LLMConfig(
        model_loading_config={"model_id": "m", "model_source": model},
        engine_kwargs={
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 64,
            "enforce_eager": True,
            "kv_transfer_config": {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu",
            },
        },
        placement_group_config={"bundles": [{"CPU": 1}]},
        deployment_config={"num_replicas": 1, "max_ongoing_requests": 256},
        runtime_env={"env_vars": ENVIRONMENT | {BIND: str(core)}},
    )


def part() -> None:
    """Put each engine on its own core, and let what spins there have only what the engine leaves.

    vLLM's NIXL connector moves the thread that computes to the last core of a NUMA node, whatever it was
    bound to (`sched_setaffinity` in nixl/base_worker.py): two workers of one machine would share that core.
    NIXL's progress thread never sleeps, not even at rest.
    """
    for process in psutil.Process().children(recursive=True):
        if process.name().startswith("VLLM::Worker"):
            core = int(process.environ()[BIND])
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})
            others = [thread for thread in process.threads() if thread.id != process.pid]
            spins = max(others, key=lambda thread: thread.user_time + thread.system_time)
            if "--leave" not in sys.argv:
                os.sched_setscheduler(spins.id, os.SCHED_IDLE, os.sched_param(0))
            print(f"worker {process.pid}: core {core}, thread {spins.id} spins", flush=True)


def main() -> None:
    """Serve until Ctrl-C."""
    model, *rest = (argument for argument in sys.argv[1:] if argument != "--leave")
    port = int(rest[0]) if rest else 8123
    prefill_core, decode_core, *_ = sorted(os.sched_getaffinity(0))
    os.environ |= {"RAY_worker_niceness": "0"}  # Ray's 15 would lose to the client of the load
    ray.init(num_cpus=CPUS, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(
        build_pd_openai_app(
            {"prefill_config": worker(model, prefill_core), "decode_config": worker(model, decode_core)}
        )
    )
    part()
    print(f"ready: http://127.0.0.1:{port}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
