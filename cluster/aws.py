"""The section `aws` of a cluster file: machines that `ray up` rents, one for each node and for the head."""

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cluster.patterns import (
    AMI_PATTERN,
    PROFILE_PATTERN,
    SECURITY_GROUP_PATTERN,
    SUBNET_PATTERN,
    VARIABLE_PATTERN,
)
from cluster.pods import SECRETS

PORT: Final = 6379


class Aws(BaseModel):
    """What Amazon has to know of the machines.

    instances: types of machines, for `head`, and for node groups or single nodes. image: with Handoff and the
    model; `ray` and `handoff` are on the path of a login shell. subnet, security_group: of all machines; the
    group lets its own members reach each other. efa: Elastic Fabric Adapters of each node; the head has none.
    instance_profile: the role of all machines, also for the bucket; the head's may make and end machines.
    placement_group: an existing one, of the strategy `cluster`, for the nodes. disk_gib: of the root volume.
    key_name: of the key pair whose private part is ssh_key. env: variables of every Ray process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    region: Annotated[str, Field(min_length=1)]
    availability_zone: Annotated[str, Field(min_length=1)]
    instances: Mapping[str, Annotated[str, Field(min_length=1)]]
    image: Annotated[str, Field(pattern=AMI_PATTERN)]
    subnet: Annotated[str, Field(pattern=SUBNET_PATTERN)]
    security_group: Annotated[str, Field(pattern=SECURITY_GROUP_PATTERN)]
    instance_profile: Annotated[str, Field(pattern=PROFILE_PATTERN)]
    key_name: Annotated[str, Field(min_length=1)]
    placement_group: str | None = None
    efa: Annotated[int, Field(ge=0, le=32)] = 0
    disk_gib: Annotated[int, Field(ge=8, le=16384)] = 200
    ssh_user: Annotated[str, Field(min_length=1)] = "ubuntu"
    ssh_key: Annotated[str, Field(min_length=1)] = "~/.ssh/id_ed25519"
    env: Mapping[Annotated[str, Field(pattern=VARIABLE_PATTERN)], str] = {}

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name in value:
            if any(part in name.upper() for part in SECRETS):
                raise ValueError(f"{name!r} looks like a secret, which does not belong in this file")
        return value
