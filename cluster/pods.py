"""The section `kubernetes` of a cluster file: what Kubernetes needs to know beyond what every cluster has."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cluster.patterns import DNS_PATTERN, IMAGE_PATTERN, VARIABLE_PATTERN

SECRETS: Final = ("TOKEN", "SECRET", "PASSWORD", "API_KEY")

Variable = Annotated[str, Field(pattern=VARIABLE_PATTERN)]
PodName = Annotated[str, Field(pattern=DNS_PATTERN)]
Experiment = Literal["serving", "placement"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class PodPlace(_Model):
    """Where a pod may run, in Kubernetes' own words, passed on unchanged.

    node_name: of the machine. node_selector: labels that it must carry. affinity: to machines and to other
    pods. tolerations: of its taints.
    """

    node_name: str | None = None
    node_selector: Mapping[str, str] = {}
    affinity: Mapping[str, Any] = {}
    tolerations: tuple[Mapping[str, Any], ...] = ()


class Kubernetes(_Model):
    """Each node of the file is a pod there, which KubeRay starts.

    image: with its tag; `Dockerfile` makes it. namespace: None: that of whoever applies it.
    volume: where models come from, as Kubernetes describes a volume; it is mounted read-only at `mount`.
    env: variables of every pod. pods: where the pods of a node group, or of one node, may run.
    experiment: what the RayJob runs; see `experiments/on_cluster.py`.
    """

    image: Annotated[str, Field(pattern=IMAGE_PATTERN)]
    namespace: PodName | None = None
    volume: Mapping[str, Any] | None = None
    mount: Annotated[str, Field(pattern=r"^/[^:]*[^:/]$")] = "/models"
    env: Mapping[Variable, str] = {}
    pods: Mapping[str, PodPlace] = {}
    experiment: Experiment = "serving"

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name in value:
            if any(part in name.upper() for part in SECRETS):
                raise ValueError(
                    f"{name!r} looks like a secret, which does not belong in this file; "
                    f"see docs/kubernetes.md for how pods get secrets"
                )
        return value
