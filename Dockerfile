# Ray and Handoff for pods and machines: --target cpu, or --target cuda.
#
#   docker build --target cpu --tag registry.example/handoff:0.1.0-cpu .
#
# Packages are those of requirements/, without what only tests need.
FROM python:3.11.14-slim-bookworm AS build
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1
RUN pip install --no-cache-dir uv==0.13.8 && uv venv /opt/venv
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY kv kv
COPY cluster cluster
COPY actors actors
COPY deployments deployments
COPY experiments experiments
COPY handoff handoff

FROM build AS build-cpu
RUN uv pip install --python /opt/venv/bin/python --constraint requirements/cpu.txt '.[cpu,nixl]'

FROM build AS build-cuda
RUN uv pip install --python /opt/venv/bin/python --constraint requirements/cuda.txt '.[cuda,nixl]'

# g++: PyTorch compiles kernels when an engine starts. wget: KubeRay's probes of older versions.
FROM python:3.11.14-slim-bookworm AS run
# Versions are those of the base image's Debian release, whose updates carry fixes of security.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libgomp1 libnuma1 procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home handoff
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/handoff

FROM run AS cpu
COPY --from=build-cpu /opt/venv /opt/venv

FROM run AS cuda
COPY --from=build-cuda /opt/venv /opt/venv
