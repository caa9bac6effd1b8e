# SPDX-License-Identifier: Apache-2.0
# One image for the router and the simulated replicas; they differ by their entry point (docs/how-to/containers.md).
# tests/system/test_containers.py runs the commands of this file, as far as that goes without Docker.

FROM python:3.11.14-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /build
# Without pip: what runs needs none, and what is not there cannot be used.
RUN python -m venv --without-pip /opt/kvrouter
# Every package at the version and with the hash that `make lock` wrote, with all extras that a router can use. They come
# before the source, so that a change of the source does not install them again.
COPY requirements-image.lock requirements-build.lock ./
RUN pip --python /opt/kvrouter install --require-hashes --no-deps --requirement requirements-image.lock
RUN pip install --require-hashes --no-deps --requirement requirements-build.lock
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE setup.py ./
COPY client/ client/
COPY contract/ contract/
COPY events/ events/
COPY router/ router/
COPY engine_patch/ engine_patch/
COPY simulator/ simulator/
COPY replay/ replay/
COPY shadow/ shadow/
# The modules that decide are compiled here; an image in which one is not would be a hundred times slower.
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . ./engine_patch
RUN pip --python /opt/kvrouter install --no-deps --no-index /wheels/hybrid_kv_router-*.whl
# For engines, which copy it from here: plain Python for any version, so nothing is compiled.
RUN pip install --no-deps --no-index --no-compile --target /opt/kvrouter-patch /wheels/hybrid_kv_engine_patch-*.whl
RUN /opt/kvrouter/bin/python -c "from kvrouter.router.base.common.compiled import caution; raise SystemExit(caution())"

FROM python:3.11.14-slim-bookworm
LABEL org.opencontainers.image.title="hybrid-kv-router" \
      org.opencontainers.image.licenses="Apache-2.0"
# A number of its own, so that a volume's files belong to the same user on every host.
RUN groupadd --gid 10001 kvrouter \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin kvrouter \
 && install -d -o kvrouter -g kvrouter -m 0700 /var/lib/kvrouter
COPY --from=build /opt/kvrouter /opt/kvrouter
COPY --from=build /opt/kvrouter-patch /opt/kvrouter-patch
# 0.0.0.0 is inside the container; what of it is reachable from outside is said by `ports` or -p.
ENV PATH=/opt/kvrouter/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    KVROUTER_HOST=0.0.0.0 \
    KVROUTER_PORT=30000 \
    KVROUTER_DATA_DIR=/var/lib/kvrouter
USER 10001:10001
WORKDIR /var/lib/kvrouter
EXPOSE 30000
# Not urllib: Docker may hand a proxy to every container, and urllib would ask that for 127.0.0.1.
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import http.client, os; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['KVROUTER_PORT']), timeout=2); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["kvrouter"]
CMD ["serve"]
