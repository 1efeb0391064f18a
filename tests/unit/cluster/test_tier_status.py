"""Reports of nodes at whose port something other than the tier's nginx answers."""

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shardcache.cluster.node_list import Node
from shardcache.cluster.tier_status import ask


@pytest.mark.parametrize("page", [{}, [], 7, {"node": "one"}])
async def test_another_server_counts_as_down(page: object) -> None:
    """Its JSON is not a node's view of the cluster; the report says so and can be shown."""

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.json_response(page)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        assert server.port is not None
        (report,) = await ask((Node("one", "127.0.0.1"),), server.port, None)
    assert report.state == "down: not this tier"
    assert json.loads(json.dumps(report.to_json()))["up"] is False
