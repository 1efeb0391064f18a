"""The page's static files, read once and versioned by a hash over all of them so that browsers can cache them."""

from __future__ import annotations

import hashlib
import mimetypes
from importlib.resources import files

from aiohttp import web

from shardcache.server.tcp import BROWSER_HEADERS

PAGE = "index.html"
STATIC_PATH = "/dashboard/static/"

_FOR_EVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"


class Files:
    """All files of the page, in memory."""

    def __init__(self) -> None:
        folder = files(__package__) / "static"
        self._contents = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(self._contents):
            digest.update(name.encode() + b"\0" + self._contents[name])
        self.version = digest.hexdigest()
        # Addresses are relative: a proxy may serve the page below any path.
        folder_name = f"{STATIC_PATH}{self.version}/".removeprefix("/")
        self._contents[PAGE] = self._contents[PAGE].replace(b'"static/', f'"{folder_name}'.encode())

    def __repr__(self) -> str:
        return f"Files({self.version}, {sum(map(len, self._contents.values()))} bytes)"

    async def page(self, request: web.Request) -> web.Response:
        """Serve the page itself."""
        return self._answer(request, PAGE, _ASK_AGAIN)

    async def static(self, request: web.Request) -> web.Response:
        """Serve one of the page's files. Raises HTTPNotFound for an unknown name or another version."""
        name = request.match_info["name"]
        if request.match_info["version"] != self.version or name not in self._contents or name == PAGE:
            raise web.HTTPNotFound
        return self._answer(request, name, _FOR_EVER)

    def _answer(self, request: web.Request, name: str, keep: str) -> web.Response:
        headers = BROWSER_HEADERS | {"Cache-Control": keep, "ETag": f'"{self.version}"'}
        if any(tag.value == self.version for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        kind, _ = mimetypes.guess_type(name)
        return web.Response(
            body=self._contents[name], content_type=kind or "application/octet-stream", charset="utf-8", headers=headers
        )
