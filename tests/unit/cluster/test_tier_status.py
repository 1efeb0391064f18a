"""Reports of nodes at whose port something other than the tier's nginx answers."""

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shardcache.cluster.node_list import Node
from shardcache.cluster.tier_status import ask
from shardcache.shared.front import PEERS


@pytest.mark.parametrize(
    "page", [{}, [], 7, {"node": "one"}, {"digest": "x"}, {"digest": ["x"], "peers": 1}]
)
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


@pytest.mark.parametrize("page", [{}, [1], {"files": 7}])
async def test_node_with_other_figures_has_none(page: object) -> None:
    """Its nginx serves the tier, but the figures are not those of this release."""

    async def answer(request: web.Request) -> web.Response:
        is_peers = request.path == PEERS
        return web.json_response({"node": "one", "digest": "x", "peers": 1} if is_peers else page)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        assert server.port is not None
        (report,) = await ask((Node("one", "127.0.0.1"),), server.port, None)
    assert report.state == "up"
    assert report.hit_share is None
