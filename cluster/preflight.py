"""What on this machine would keep a cluster from coming up: found before any process is started."""

import configparser
import errno
import importlib.util
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cluster import api_keys, netns
from cluster.errors import BringUpError, ClusterFileError
from cluster.explain import listed
from cluster.fake import FAKE
from cluster.file import S3, ClusterFile
from cluster.launch import shared_memory
from cluster.model_config import is_path
from cluster.sizes import show

SHARED_MEMORY: Final = Path("/dev/shm")
_ROLE_OF_MACHINE: Final = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def require(file: ClusterFile) -> None:
    """Raise BringUpError, with a line for each obstacle, unless the nodes of `file` can be started here."""
    if found := list(obstacles(file)):
        raise BringUpError(f"{file.name!r} cannot be brought up here: {listed(found)}")


def obstacles(file: ClusterFile) -> Iterator[str]:
    """One line for each: the field, the value, and what to do."""
    if file.hosts is not None:
        yield (
            f"hosts: the nodes of this file are machines that `ray up` reaches (head: {file.hosts.head}); "
            f"use `handoff render`, or leave `hosts` out to have all nodes on this machine"
        )
        return
    if file.aws is not None:
        yield (
            f"aws: the nodes of this file are machines that `ray up` rents (in {file.aws.region}); use "
            f"`handoff render`, or leave `aws` out to have all nodes on this machine"
        )
        return
    if importlib.util.find_spec("vllm") is None:
        yield "engine: vLLM is not installed in this Python; install it: pip install 'handoff[cpu]' or [cuda]"
    if file.transport == "nixl" and importlib.util.find_spec("nixl") is None:
        yield "transport: nixl needs NIXL, which is not installed: pip install 'handoff[nixl]', or choose tcp"
    if file.links is not None:
        if (reason := netns.missing()) is not None:
            yield f"links: each node would be a network namespace: {reason}; or leave `links` out"
        elif not Path(file.model).is_dir() and os.environ.get("HF_HUB_OFFLINE") != "1":
            yield (
                f"links: nodes in namespaces reach each other and this machine, but no hub, so {file.model} "
                f"cannot be loaded; give `model` a folder, or set HF_HUB_OFFLINE=1 if it has been downloaded"
            )
    yield from _models(file)
    yield from _files(file)
    yield from _gateway(file.gateway.host, file.gateway.port)
    if file.s3 is not None:
        yield from credentials(file.s3, os.environ)
    yield from _shared_memory(file)


def _models(file: ClusterFile) -> Iterator[str]:
    places = {file.model: "model"}
    for name, group in file.nodes.items():
        if group.model is not None:
            places.setdefault(group.model, f"nodes.{name}.model")
    fake = FAKE in file.engine
    for model, where in places.items():
        folder = Path(model)
        if not folder.is_dir():
            if is_path(model):
                yield (
                    f"{where}: {model} is no folder on this machine; correct the path (relative "
                    f"ones start from the cluster file), or make a model: handoff model make PATH"
                )
            continue
        if not (folder / "config.json").is_file():
            yield f"{where}: {model} has no config.json; give a folder in Hugging Face layout, or a hub id"
        elif not fake and not any(folder.glob("*.safetensors")):
            yield f"{where}: {model} has no *.safetensors; download the weights, or try --engine fake"


def _files(file: ClusterFile) -> Iterator[str]:
    if file.tls is not None:
        for field, path in file.tls.model_dump().items():
            if not os.access(path, os.R_OK) or not Path(path).is_file():
                yield f"tls.{field}: {path} is no file that can be read here; give the path of a PEM file"
    try:
        api_keys.read(file.gateway.api_keys_file)
    except ClusterFileError as error:
        yield str(error)
    if file.s3 is not None and file.s3.ca_file is not None and not Path(file.s3.ca_file).is_file():
        yield f"s3.ca_file: {file.s3.ca_file} is no file here; give certificates in PEM, or leave it out"


def _gateway(host: str, port: int) -> Iterator[str]:
    """The gateway will listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield f"gateway.port: {port} is taken by another program on {host}; set a free one, or end that"
        elif error.errno == errno.EACCES:
            yield f"gateway.port: {port} needs root on this machine; set one above 1023"
        else:
            reason = error.strerror or str(error)
            yield (
                f"gateway.host: {host} is no address to listen on here ({reason}); set one of this "
                f"machine's, or 0.0.0.0 for all"
            )


def credentials(s3: S3, environment: Mapping[str, str]) -> Iterator[str]:
    """What is missing of a bucket's credentials; on AWS's own machines, the machine's role may do."""
    pair = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    given = [name for name in pair if environment.get(name)]
    if len(given) == 1:
        (missing,) = set(pair) - set(given)
        yield f"s3: {given[0]} is in the environment, and {missing} is not; set both, or neither"
    elif not given and not _elsewhere(environment) and s3.endpoint is not None:
        yield (
            f"s3: no credentials for bucket {s3.bucket!r} at {s3.endpoint}: set AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY in the environment of `handoff`, or name a profile in AWS_PROFILE; "
            f"never in this file"
        )


def _elsewhere(environment: Mapping[str, str]) -> bool:
    """Whether the AWS SDK would find credentials outside of the two variables."""
    if any(environment.get(name) for name in _ROLE_OF_MACHINE):
        return True
    home = Path(environment.get("HOME", "~")).expanduser()
    wanted = environment.get("AWS_PROFILE", "default")
    for variable, path in (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")):
        parser = configparser.RawConfigParser()
        try:
            parser.read(environment.get(variable, home / ".aws" / path))
        except (configparser.Error, UnicodeDecodeError):
            return True  # the SDK reads them otherwise; it will say what it cannot read
        if parser.has_section(wanted) or parser.has_section(f"profile {wanted}"):
            return True
    return False


def _shared_memory(file: ClusterFile) -> Iterator[str]:
    """Ray would silently put a store that does not fit on disk, where it is a hundred times slower."""
    if not SHARED_MEMORY.is_dir():
        return
    needed, free = shared_memory(file), shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        yield (
            f"nodes: the object stores need {show(needed)} of shared memory, but {SHARED_MEMORY} has "
            f"{show(free)} free; lower object_store under `nodes`, or enlarge {SHARED_MEMORY}"
        )


def hosts_notes(file: ClusterFile, token: Path) -> Iterator[str]:
    """What `ray up` will look for on the machine that it runs on, and is not on this one."""
    machines = file.hosts or file.aws
    if machines is None:
        return
    if not token.is_file() or not token.read_text("utf-8").strip():
        yield (
            f"{token} is not here, or empty: it holds the cluster's token, and `ray up` copies it to every "
            f"machine; make it: ray get-auth-token --generate"
        )
    if not Path(machines.ssh_key).expanduser().is_file():
        where = "aws" if file.hosts is None else "hosts"
        yield f"{where}.ssh_key: {machines.ssh_key} is not here; `ray up` needs it to get into the machines"
