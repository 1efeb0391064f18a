"""Endpoints to download from: SeaweedFS, and static files of nginx, each over http and https."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data import Kind
from benchmarks.workplace import BUCKET, Workplace
from support.cluster.tier import NGINX, Nginx
from support.network.ports import free_port
from support.stores import aws_env

# S3 does not close a connection after nginx's default of 1,000 requests.
_CONFIG = """
daemon off;
worker_processes auto;
pid {folder}/pid;
{user}
events {{ }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 1000000;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    scgi_temp_path {folder}/scgi;
    uwsgi_temp_path {folder}/uwsgi;
    ssl_protocols TLSv1.2 TLSv1.3;
    ssl_certificate {certificate};
    ssl_certificate_key {certificate};
    server {{
        add_header x-goog-generation 1;
        listen 127.0.0.1:{http};
        listen 127.0.0.1:{https} ssl;
        location {location}/ {{ alias {shards}/; }}
    }}
}}
"""


@dataclass(frozen=True, slots=True)
class Endpoint:
    name: str  # in the results
    # Variables by which S3 clients find the server, and trust its certificate.
    env: Mapping[str, str]
    pid: int = 0  # of the server, where it is asked for what it costs

    @property
    def tls(self) -> bool:
        return "AWS_CA_BUNDLE" in self.env


@contextmanager
def endpoints(place: Workplace, kind: Kind) -> Iterator[list[Endpoint]]:
    """Serve the kind's shards at `place.url(kind)`, from SeaweedFS if nginx is not installed."""
    place.url(kind)
    found = [
        Endpoint("SeaweedFS, http", place.store.env()),
        Endpoint("SeaweedFS, https", place.store.https_env()),
    ]
    if NGINX is None:
        place.say("no nginx, its rows are left out: apt-get install nginx-light")
        yield found
        return
    with _nginx(place, kind) as static:
        yield [*static, *found]


@contextmanager
def _nginx(place: Workplace, kind: Kind) -> Iterator[list[Endpoint]]:
    http = free_port()
    https = free_port()
    for path in place.dataset(kind).shards:
        path.read_bytes()  # from now on in the page cache: the disk is not what is measured
    with tempfile.TemporaryDirectory(prefix="shardcache-nginx-") as name:
        config = Path(name, "nginx.conf")
        config.write_text(
            _CONFIG.format(
                folder=name,
                # The dataset's folder may be closed to the user that nginx would change to.
                user="user root;" if os.geteuid() == 0 else "",
                certificate=place.authority.server_file(),
                http=http,
                https=https,
                location=f"/{BUCKET}/{kind.name}",
                shards=place.dataset(kind).folder.resolve(),
            )
        )
        with Nginx(None, config, [("127.0.0.1", http)]) as nginx:
            secure = {"AWS_CA_BUNDLE": str(place.authority.ca_file)}
            yield [
                Endpoint("nginx, http", aws_env(f"http://127.0.0.1:{http}"), nginx.pid),
                Endpoint("nginx, https", aws_env(f"https://127.0.0.1:{https}") | secure, nginx.pid),
            ]
