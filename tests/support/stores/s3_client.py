"""Botocore's S3 clients, with sessions that share only the service's description."""

from functools import cache
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.loaders import Loader


def s3_client(
    endpoint_url: str,
    access_key: str,
    secret_key: str,
    token: str | None = None,
    *,
    region: str,
    config: Config,
) -> Any:
    """Return a client that is given its keys, instead of finding the user's."""
    session = botocore.session.Session()
    session.register_component("data_loader", _service_descriptions())
    session.set_credentials(access_key, secret_key, token)
    return session.create_client("s3", region_name=region, endpoint_url=endpoint_url, config=config)


@cache
def _service_descriptions() -> Loader:
    """Return what keeps the service's description, since it takes long to read."""
    return Loader()
