"""Ray Serve LLM's own prefill/decode app, to hold against Handoff; runs in an environment with `ray[llm]`.

python examples/ray_serve_llm.py MODEL [PORT]: one prefill and one decode worker, a CPU core each, KV over
NIXL, until Ctrl-C. docs/router.md has the environment and the load.
"""

import signal
import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_pd_openai_app

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


def worker(model: str) -> LLMConfig:
    """Return what prefill and decode have alike; on GPUs: no bundle of CPUs, and KV buffers on the device."""
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
        runtime_env={"env_vars": ENVIRONMENT},
    )


def main() -> None:
    """Serve until Ctrl-C."""
    model, port = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8123
    ray.init(num_cpus=8, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_pd_openai_app({"prefill_config": worker(model), "decode_config": worker(model)}))
    signal.pause()


if __name__ == "__main__":
    main()
