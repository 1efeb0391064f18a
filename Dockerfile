# syntax=docker/dockerfile:1
# The daemon, from a checkout:  docker build -t registry.example.com/shardcache:0.2.0 .
# … and from a tag:  docker build -t registry.example.com/shardcache:0.2.0 REPOSITORY#v0.2.0
# The daemon and the nginx of a cluster's tier:  docker build --target tier -t registry.example.com/shardcache-tier:0.2.0 .
# Further stores (gcsfs, adlfs, …):  --build-arg EXTRA="gcsfs adlfs"
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG EXTRA=""
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY shardcache shardcache
COPY client client
# Wheels first, all of them; the environment is then made of nothing but these. No pip stays in it.
# hadolint ignore=DL3013
RUN pip wheel --no-cache-dir --wheel-dir /wheels -c constraints.txt '.[cluster]' ${EXTRA} \
 && python -m venv --without-pip /opt/shardcache \
 && pip --python /opt/shardcache install --no-cache-dir --no-index --find-links /wheels 'shardcache[daemon]' ${EXTRA}

FROM build AS build-tier
# hadolint ignore=DL3013
RUN pip --python /opt/shardcache install --no-cache-dir --no-index --find-links /wheels 'shardcache[cluster]'

FROM ${BASE} AS runtime
ARG VERSION=0.2.0
LABEL org.opencontainers.image.title="shardcache" \
      org.opencontainers.image.description="A per-node daemon that pulls tar shards from object storage ahead of need" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# A fixed id: it owns the folders on the node, and training pods have it among their supplementalGroups.
RUN groupadd --gid 52780 shardcache \
 && useradd --uid 52780 --gid 52780 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin shardcache
ENV PATH=/opt/shardcache/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
ENTRYPOINT ["shardcache"]
CMD ["serve"]

FROM runtime AS tier
# nginx gets the distribution's security updates: rebuild for them, a pinned version would keep the old one.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends nginx libnginx-mod-http-lua \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
COPY --from=build-tier /opt/shardcache /opt/shardcache
USER 52780:52780

# Last, for it is what is built where no target is named: few need a web server in their image.
FROM runtime AS daemon
COPY --from=build /opt/shardcache /opt/shardcache
USER 52780:52780
