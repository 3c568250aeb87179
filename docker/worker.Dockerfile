# syntax=docker/dockerfile:1.7
# The worker: holds the model and computes. Build context: the repository.
#
#   docker build -f docker/worker.Dockerfile -t tercet-worker:0.1.0 .
#   docker build -f docker/worker.Dockerfile -t tercet-worker:0.1.0-cuda --build-arg DEVICE=cuda .
#
# DEVICE chooses torch: `cpu` is PyTorch's CPU-only build, `cuda` the one of the package index, which brings CUDA's
# libraries along; the driver comes from the host by NVIDIA's container toolkit. TORCH_INDEX overrides the index of
# torch (empty: pip's own). With `cuda` the worker has its extra of that name, and computes on a GPU where there is one
# (docs/gpu.md); FlashInfer compiles at first use, into the cache: mount a volume there, and bring nvcc or its wheel of
# compiled kernels.
#
# Base images are pinned to a patch release. A digest pins more; give one with --build-arg PYTHON_IMAGE=…@sha256:….
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG DEVICE=cpu

# ------------------------------------------------------------------------------------------------- our wheels
FROM ${PYTHON_IMAGE} AS wheels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY shared/ shared/
COPY services/worker/ services/worker/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir /wheels ./shared ./services/worker

# ------------------------------------------------------------------------------------------------- their environment
FROM ${PYTHON_IMAGE} AS environment
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Debian removes old point releases, so a pinned version would stop to build; the release is pinned by the base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
# torch first and alone: its index concerns nothing else, and its layer stays when our code changes.
ARG DEVICE
ARG TORCH_INDEX
RUN --mount=type=cache,target=/root/.cache/pip \
    case "${DEVICE}" in \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        cuda) index= ;; \
        *) echo "DEVICE is cpu or cuda, not '${DEVICE}'" >&2; exit 1 ;; \
    esac \
    && index="${TORCH_INDEX-${index}}" \
    && python -m venv --without-pip /opt/tercet \
    && pip --python /opt/tercet/bin/python install --constraint constraints.txt ${index:+--index-url "${index}"} torch
COPY --from=wheels /wheels /wheels
RUN --mount=type=cache,target=/root/.cache/pip \
    worker="$(echo /wheels/tercet_worker-*.whl)" \
    && if [ "${DEVICE}" = cuda ]; then worker="${worker}[cuda]"; fi \
    && pip --python /opt/tercet/bin/python install --constraint constraints.txt /wheels/tercet_shared-*.whl "${worker}"
# One library with the kernels of every instruction set. Which of them run is decided where it is loaded, so the image
# does not depend on the processor that built it; and it needs no compiler, which the last stage does not have.
RUN TERCET_CACHE=/opt/tercet/cache /opt/tercet/bin/python -m tercet_worker.kernels.build
COPY docker/image/probe.py LICENSE /opt/tercet/

# ------------------------------------------------------------------------------------------------- the image
FROM ${PYTHON_IMAGE} AS runtime-cpu

FROM ${PYTHON_IMAGE} AS runtime-cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# hadolint ignore=DL3006
FROM runtime-${DEVICE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tercet-worker" \
      org.opencontainers.image.description="Tercet's worker: weights, KV cache, the forward pass, sampling" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# The same group in all three images: it may use the core's socket. Nothing at run time needs a writable root: byte
# code and kernels are compiled, /tmp is a tmpfs, models are in a volume.
RUN groupadd --system --gid 10000 tercet \
    && useradd --system --uid 10003 --gid 10000 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin worker \
    && install -d -o 10001 -g 10000 -m 0755 /models \
    && install -d -o 10002 -g 10000 -m 0750 /run/tercet
COPY --from=environment /opt/tercet /opt/tercet

ENV PATH=/opt/tercet/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    HF_HOME=/models \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TERCET_CACHE=/opt/tercet/cache \
    TERCET_LINK=/run/tercet/worker.sock \
    TERCET_METRICS_HOST=0.0.0.0 \
    TERCET_METRICS_PORT=9100 \
    TERCET_LOG_FORMAT=json
WORKDIR /tmp
USER 10003:10000
EXPOSE 9100
STOPSIGNAL SIGTERM
# Alive, not ready: who restarts what is unhealthy must not restart what loads a large model or waits for its core.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-ISE", "/opt/tercet/probe.py", "http://127.0.0.1:9100/livez"]
ENTRYPOINT ["tercet", "worker"]
