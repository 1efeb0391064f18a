"""A real Chromium without a screen, driven by chromedevtools.github.io/devtools-protocol."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from support.programs.guard import GUARD_S

PROGRAM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # the tests may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
_ANSWERS_AT = "DevTools listening on "


@dataclass(slots=True)
class Tab:
    """One page.

    Attributes:
        complaints: warnings and errors on its console, and exceptions that nobody caught.
    """

    _connection: ClientConnection
    _session: str = ""
    requested: list[str] = field(default_factory=list)  # every url that it asked for
    complaints: list[str] = field(default_factory=list)
    _sent: int = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises RuntimeError for an error."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(timeout=GUARD_S))
            if answer.get("id") != self._sent:
                self._hear(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                found: dict[str, Any] = answer["result"]
                return found

    def _hear(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"method": "Network.requestWillBeSent", "params": {"request": {"url": url}}}:
                self.requested.append(url)
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.complaints.append(
                    str(details.get("exception", details).get("description", details))
                )
            case {
                "method": "Runtime.consoleAPICalled",
                "params": {"type": "error" | "warning", "args": args},
            }:
                self.complaints.append(str(args))
            case {
                "method": "Log.entryAdded",
                "params": {"entry": {"level": "error" | "warning", "text": text, **rest}},
            }:
                self.complaints.append(f"{text} {rest.get('url', '')}")

    def open(self, url: str) -> None:
        """Go to a url; its contents come in their own time."""
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return a script's result, awaited, as JSON. Raises RuntimeError if it throws."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(
                f"{script}: {answer['exceptionDetails']['exception'].get('description')}"
            )
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Return a script's result once true, despite early errors. Raises TimeoutError."""
        deadline_s = time.monotonic() + GUARD_S
        while True:
            with suppress(RuntimeError):
                if found := self.evaluate(script):
                    return found
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"{script} did not come true; the page says:\n{self.text()}\n{self.complaints}"
                )
            time.sleep(0.05)

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **text,
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def look(self, *, dark: bool = False, width: int = 1280) -> None:
        """Be a screen of a width, of somebody who prefers light or dark colours."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=False,
        )

    def picture(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium() -> Iterator[ClientConnection]:
    """Run a browser with a profile of its own; yield a connection to it, for `tab`."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = (PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank")
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            assert process.stderr is not None
            said = iter(process.stderr.readline, b"")
            address = next(line for line in map(bytes.decode, said) if line.startswith(_ANSWERS_AT))
            url = address.removeprefix(_ANSWERS_AT).strip()
            # Events pile up while a test does other things, and pings would go unanswered behind
            # them.
            with connect(
                url, max_size=None, max_queue=None, ping_interval=None, open_timeout=GUARD_S
            ) as connection:
                yield connection
        finally:
            process.terminate()
            process.communicate(timeout=GUARD_S)


@contextmanager
def tab(browser: ClientConnection) -> Iterator[Tab]:
    found = Tab(browser)
    context = found.call("Target.createBrowserContext")["browserContextId"]
    target = found.call("Target.createTarget", url="about:blank", browserContextId=context)[
        "targetId"
    ]
    session = found.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    found._session = session
    for domain in ("Page", "Runtime", "Network", "Log"):
        found.call(f"{domain}.enable")
    try:
        yield found
    finally:
        found._session = ""
        found.call("Target.disposeBrowserContext", browserContextId=context)


@contextmanager
def opened(browser: ClientConnection, url: str, **look: Any) -> Iterator[Tab]:
    """Open a daemon's page as `Tab.look` says, and yield it once it is live and drawn."""
    with tab(browser) as page:
        page.look(**look)
        page.open(url)
        page.until(
            "document.querySelector('.live') && document.querySelector('#verdict-text').innerText"
        )
        yield page
