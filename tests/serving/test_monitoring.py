"""A real Prometheus scrapes the gateway, evaluates the rules and answers every query of the dashboard."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from asking import until
from comparing import prompt
from guarded import Guarded

from cluster.network import free_ports

MONITORING = Path(__file__).parents[2] / "deployments" / "monitoring"
STARTED_WITHIN_S = 60.0
SCRAPED_WITHIN_S = 60.0

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no prometheus and promtool on PATH; on Debian: apt-get install prometheus",
)
pytestmark = [needs_prometheus]


@pytest.mark.parametrize("what", [["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]])
def test_promtool_accepts_the_rules(what: list[str]) -> None:
    done = subprocess.run(["promtool", *what], cwd=MONITORING, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_every_alert_is_tested() -> None:
    rules = (MONITORING / "rules.yml").read_text("utf-8")
    tests = (MONITORING / "rules_test.yml").read_text("utf-8")
    names = [line.split()[-1] for line in rules.splitlines() if "- alert:" in line]
    assert len(names) > 5
    assert [name for name in names if f"alertname: {name}" not in tests] == []


@pytest.fixture(scope="module")
def prometheus(guarded: Guarded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the gateway every second; it is given no key."""
    folder, (port,) = tmp_path_factory.mktemp("prometheus"), free_ports(1)
    address = f"127.0.0.1:{port}"
    (folder / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(MONITORING / "rules.yml")],
                "scrape_configs": [
                    {
                        "job_name": "handoff",
                        "static_configs": [{"targets": [guarded.endpoint.url.removeprefix("http://")]}],
                    }
                ],
            }
        ),
        encoding="utf-8",
    )
    argv = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://{address}", timeout=10) as client:
                until(lambda: ready(process, client, folder / "log"), "Prometheus is ready", STARTED_WITHIN_S)
                yield client
        finally:
            process.kill()


def ready(process: subprocess.Popen[bytes], client: httpx.Client, log: Path) -> bool:
    assert process.poll() is None, log.read_text("utf-8", errors="replace")
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def ask(prometheus: httpx.Client, query: str) -> list[dict[str, Any]]:
    response = prometheus.get("/api/v1/query", params={"query": query})
    assert response.status_code == 200, f"{query}: {response.text}"
    result: list[dict[str, Any]] = response.json()["data"]["result"]
    return result


def work(guarded: Guarded, turn: int) -> None:
    """Requests of all kinds: divided both ways, undivided, refused."""
    for index in range(3):
        tokens = prompt(100 + index, f"monitoring {turn}")
        guarded.endpoint.complete(tokens, max_tokens=8, ignore_eos=True)
        guarded.endpoint.complete(tokens, max_tokens=8, presence_penalty=0.5, stream=True)
        guarded.endpoint.complete(tokens, max_tokens=1)
    httpx.get(f"{guarded.endpoint.url}/v1/models")


def queries() -> list[tuple[str, str]]:
    """The dashboard's (title, query), for a range of ten seconds."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text("utf-8"))
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "10s").replace("$instance", ".+"))
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


@pytest.mark.cluster
def test_prometheus_answers_the_dashboards_queries(guarded: Guarded, prometheus: httpx.Client) -> None:
    asked = queries()
    assert len(asked) > 15
    missing = asked
    turn = 0

    def answered() -> bool:
        nonlocal missing, turn
        work(guarded, turn := turn + 1)
        found = [(one, ask(prometheus, one[1])) for one in asked]
        missing = [one for one, result in found if not result or "NaN" in str(result[0]["value"])]
        return not missing

    try:
        until(answered, "every panel has a value", SCRAPED_WITHIN_S)
    except AssertionError:
        pytest.fail(f"no value for {missing}")


@pytest.mark.cluster
def test_what_prometheus_knows_of_the_workers(guarded: Guarded, prometheus: httpx.Client) -> None:
    work(guarded, 0)
    until(
        lambda: len(ask(prometheus, "handoff_worker_up == 1")) == 2, "both workers are up", SCRAPED_WITHIN_S
    )
    told = {(one["metric"]["role"], one["metric"]["node"]) for one in ask(prometheus, "handoff_worker_up")}
    assert told == {("prefill", "prefill-0"), ("decode", "decode-0")}
    until(
        lambda: ask(prometheus, 'handoff_kv_bytes_total{role="decode", node="decode-0"} > 0'),
        "bytes of KV that decode took",
        SCRAPED_WITHIN_S,
    )
    until(lambda: ask(prometheus, 'up{job="handoff"} == 1'), "the gateway is up", SCRAPED_WITHIN_S)
    alerts = prometheus.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
    assert {rule["health"] for rule in alerts} <= {"ok", "unknown"}
    firing = {one["metric"]["alertname"] for one in ask(prometheus, 'ALERTS{alertstate="firing"}')}
    assert not firing & {"HandoffGatewayDown", "HandoffNoWorker", "HandoffWorkerDown"}
