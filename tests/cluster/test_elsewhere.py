"""`handoff status` and `handoff down` of clusters that are not on this machine say what to run instead."""

from pathlib import Path

import pytest

from handoff import cli

FILE = """\
name: far
model: org/model
nodes: {a: {role: both, slots: 2, cpus: 2}}
"""
HOSTS = "hosts: {head: a-0, ssh_user: me, nodes: {a-0: 10.0.0.7}}\n"
AWS = """\
aws: {region: r, availability_zone: ra, instances: {head: m, a: m}, image: ami-01234567,
  subnet: subnet-01234567,
  security_group: sg-01234567, key_name: k, instance_profile: "arn:aws:iam::123456789012:instance-profile/x"}
"""
PODS = "kubernetes: {image: 'registry/handoff:1', namespace: models}\n"


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> str:
    monkeypatch.setattr("sys.argv", ["handoff", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert ended.value.code == 1
    assert printed.err.startswith("error: ")
    assert "this may be a mistake in handoff" not in printed.err
    return printed.err


@pytest.mark.parametrize(
    ("section", "command", "parts"),
    [
        (HOSTS, "status", ["ray exec RAY_FILE 'ray status'", "http://10.0.0.7:8000/handoff/workers"]),
        (HOSTS, "down", ["ray down RAY_FILE", "handoff render"]),
        (AWS, "status", ["ray exec RAY_FILE 'ray status'", "localhost:8000/handoff/workers"]),
        (AWS, "down", ["ray down RAY_FILE"]),
        (PODS, "status", ["kubectl get --namespace models rayservice/far", "far-serve-svc"]),
        (PODS, "down", ["kubectl delete -k FOLDER/overlays/OVERLAY", "--to kustomize --out FOLDER"]),
        ("", "status", ["no cluster called 'far' runs here", "ray exec", "kubectl get"]),
        ("", "down", ["no cluster called 'far' runs here", "ray down", "kubectl delete -k"]),
    ],
)
def test_a_file_whose_nodes_are_elsewhere(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    command: str,
    parts: list[str],
) -> None:
    path = tmp_path / "far.yaml"
    path.write_text(FILE + section)
    message = said(capsys, monkeypatch, command, str(path))
    for part in ("no cluster called 'far'", *parts):
        assert part in message


@pytest.mark.parametrize("command", ["status", "down"])
def test_a_name_that_is_not_known_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    message = said(capsys, monkeypatch, command, "far")
    for part in ("no cluster called 'far' runs here; running: none", "`ray up`", "KubeRay"):
        assert part in message


def test_a_file_that_cannot_be_read_is_no_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "/nowhere.yaml: cannot be read" in said(capsys, monkeypatch, "down", "/nowhere.yaml")
