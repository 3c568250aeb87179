# syntax=docker/dockerfile:1.7
# The front end: HTTP in, token streams out. No torch. Build context: the repository.
#
#   docker build -f docker/frontend.Dockerfile -t tercet-frontend:0.1.0 .
#
# Base images are pinned to a patch release. A digest pins more; give one with --build-arg PYTHON_IMAGE=…@sha256:….
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# ------------------------------------------------------------------------------------------------- our wheels
FROM ${PYTHON_IMAGE} AS wheels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY shared/ shared/
COPY services/frontend/ services/frontend/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir /wheels ./shared ./services/frontend

# ------------------------------------------------------------------------------------------------- their environment
FROM ${PYTHON_IMAGE} AS environment
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt ./
COPY --from=wheels /wheels /wheels
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/tercet \
    && pip --python /opt/tercet/bin/python install --constraint constraints.txt /wheels/*.whl
COPY docker/image/probe.py docker/image/fetch_model.py LICENSE /opt/tercet/

# ------------------------------------------------------------------------------------------------- the image
FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tercet-frontend" \
      org.opencontainers.image.description="Tercet's front end: the OpenAI-style API, tokenizing and streaming" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# The same group in all three images: it may use the socket between core and worker. Nothing at run time needs a
# writable root: byte code is compiled, /tmp is a tmpfs, models are in a volume.
RUN groupadd --system --gid 10000 tercet \
    && useradd --system --uid 10001 --gid 10000 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin frontend \
    && install -d -o 10001 -g 10000 -m 0755 /models
COPY --from=environment /opt/tercet /opt/tercet

ENV PATH=/opt/tercet/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    HF_HOME=/models \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TERCET_HOST=0.0.0.0 \
    TERCET_PORT=8000 \
    TERCET_METRICS_HOST=0.0.0.0 \
    TERCET_METRICS_PORT=9100 \
    TERCET_LOG_FORMAT=json
WORKDIR /tmp
USER 10001:10000
EXPOSE 8000 9100
STOPSIGNAL SIGTERM
# Alive, not ready: who restarts what is unhealthy must not restart what waits for its first core.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-ISE", "/opt/tercet/probe.py", "http://127.0.0.1:8000/livez"]
ENTRYPOINT ["tercet", "frontend"]
