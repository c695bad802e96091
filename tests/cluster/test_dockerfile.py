"""The image's Dockerfile: a linter accepts it, it copies what there is, and it runs as nobody special."""

import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
DOCKERFILE = PROJECT / "Dockerfile"


def lint(text: str) -> subprocess.CompletedProcess[str]:
    hadolint = Path(sys.executable).parent / "hadolint"
    argv = [hadolint, "--failure-threshold", "info", "-"]
    return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60)


def test_the_linter_accepts_it() -> None:
    text = DOCKERFILE.read_text("utf-8")
    done = lint(text)
    assert done.returncode == 0, done.stdout + done.stderr
    worse = lint(text.replace("python:3.11.14-slim-bookworm", "python:latest"))
    assert worse.returncode != 0
    assert "DL3007" in worse.stdout


def test_what_it_copies_is_there_and_let_through() -> None:
    text = DOCKERFILE.read_text("utf-8")
    copied = [
        word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for word in line.split()
    ]
    assert len(copied) > 5
    let_through = (PROJECT / ".dockerignore").read_text("utf-8").split()
    for name in copied:
        assert (PROJECT / name).exists(), name
        assert f"!{name}" in let_through, name


def test_no_target_runs_as_root() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    (run,) = [stage for stage in stages if stage.startswith("python") and " AS run\n" in stage]
    assert "\nUSER 1000:1000\n" in run
    finals = [stage for stage in stages if stage.startswith("run AS")]
    assert [stage.split()[2] for stage in finals] == ["cpu", "cuda"]
    assert all("USER" not in stage for stage in finals)
