# syntax=docker/dockerfile:1.7
# The core: schedules requests onto its worker. No torch. Build context: the repository.
#
#   docker build -f docker/core.Dockerfile -t tercet-core:0.1.0 .
#
# Base images are pinned to a patch release. A digest pins more; give one with --build-arg PYTHON_IMAGE=…@sha256:….
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# ------------------------------------------------------------------------------------------------- our wheels
FROM ${PYTHON_IMAGE} AS wheels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY shared/ shared/
COPY services/core/ services/core/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir /wheels ./shared ./services/core

# ------------------------------------------------------------------------------------------------- their environment
FROM ${PYTHON_IMAGE} AS environment
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt ./
COPY --from=wheels /wheels /wheels
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/tercet \
    && pip --python /opt/tercet/bin/python install --constraint constraints.txt /wheels/*.whl
COPY docker/image/probe.py LICENSE /opt/tercet/

# ------------------------------------------------------------------------------------------------- the image
FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tercet-core" \
      org.opencontainers.image.description="Tercet's core: requests, scheduling, the KV block pool, the prefix cache" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# The same group in all three images: it may use the socket, which the core makes with mode 0660 in its own directory.
# Nothing at run time needs a writable root: byte code is compiled, /tmp is a tmpfs, models are in a volume.
RUN groupadd --system --gid 10000 tercet \
    && useradd --system --uid 10002 --gid 10000 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin core \
    && install -d -o 10001 -g 10000 -m 0755 /models \
    && install -d -o 10002 -g 10000 -m 0750 /run/tercet
COPY --from=environment /opt/tercet /opt/tercet

ENV PATH=/opt/tercet/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    HF_HOME=/models \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TERCET_LISTEN=0.0.0.0:8100 \
    TERCET_LINK=/run/tercet/worker.sock \
    TERCET_METRICS_HOST=0.0.0.0 \
    TERCET_METRICS_PORT=9100 \
    TERCET_LOG_FORMAT=json
WORKDIR /tmp
USER 10002:10000
EXPOSE 8100 9100
STOPSIGNAL SIGTERM
# Alive, not ready: who restarts what is unhealthy must not restart what waits for its worker.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-ISE", "/opt/tercet/probe.py", "http://127.0.0.1:9100/livez"]
ENTRYPOINT ["tercet", "core"]
