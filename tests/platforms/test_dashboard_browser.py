"""The dashboard in a real Chromium, while a job reads."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest
from websockets.sync.client import ClientConnection

from support.monitoring.chromium import PROGRAM, chromium, opened, tab
from support.network.ports import free_port
from support.programs.daemon import Daemon
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.canary import GatedStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.timeout(400),  # a browser on a busy machine
]

# A job's name, and a part of a url, that would run where a page took text for markup.
MARKUP = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
TOKEN = "0123456789abcdef0123456789abcdef"
FOCUS = "(({ id, className, tagName }) => id || className || tagName)(document.activeElement)"
# Relative luminance of a colour, 0 to 1 (WCAG 2.2).
LIGHTNESS = """(() => {
    const colour = getComputedStyle(document.body).backgroundColor;
    const [r, g, b] = colour.match(/[0-9]+/g).map((c) => c / 255);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
})()"""
DOM = "import(document.querySelector('script').src.replace('main.js', 'dom.js'))"
THRICE = f"""{DOM}.then((dom) => {{
    const list = document.createElement('ul');
    list.id = 'past-jobs';
    for (const items of ['aab', 'ab', 'aba']) {{
        dom.sync(list, [...items], (name) => name, dom.setText);
    }}
    return [...list.children].map((child) => child.textContent);
}})"""
ENDINGS = f"""{DOM}.then((dom) => {{
    const urls = ['s3://b/a/train/1.tar?x=1', 's3://b/c/train/1.tar', 's3://b/c/train/2.tar'];
    return urls.map((url) => dom.ending(url, urls));
}})"""
# Words on several lines, and texts that are cut off.
BROKEN = """(() => {
    const found = [], range = document.createRange();
    const texts = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
    for (let node; (node = texts.nextNode());) {
        for (const { index, 0: word } of node.data.matchAll(/(?<!\\S)[^\\s\\/-]{2,20}(?!\\S)/g)) {
            range.setStart(node, index);
            range.setEnd(node, index + word.length);
            const lines = new Set([...range.getClientRects()].map(({ top }) => Math.round(top)));
            if (lines.size > 1) found.push(word);
        }
    }
    const cut = [...document.querySelectorAll('main :is(td, th, dd, dt, li)')].filter((each) => (
        each.checkVisibility() && !each.closest('thead')
        && each.clientWidth && each.scrollWidth > each.clientWidth + 1
    ));
    return [...found, ...cut.map((each) => each.outerHTML)];
})()"""
AXE = "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations)"


@dataclass(frozen=True, slots=True)
class Scene:
    """A daemon with a page, a job that reads from it, and a store that holds shards back."""

    daemon: Daemon
    store: GatedStore
    reader: RawSession
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[ClientConnection]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The job has one shard in hand and waits for another, which the store holds back."""
    port = free_port()
    with GatedStore() as store:
        names = [f"train-{number:06d}.tar" for number in range(6)]
        urls = [
            store.put(name, make_tar(random_samples(20, {"bin": 9_000}, first=20 * n)))
            for n, name in enumerate(names)
        ]
        for name in names[:4]:
            store.let(name)
        for name in names[4:]:
            store.let(name, 1)  # what tells size and version
        daemon = Daemon(
            tmp_path_factory.mktemp("d"),
            "--http",
            f"127.0.0.1:{port}",
            "--part-size",
            "65536",
            "--allow",
            "http://",
        )
        with daemon, RawSession(daemon, MARKUP) as reader:
            reader.plan(urls, list(range(6)))
            reader.take(0)
            yield Scene(daemon, store, reader, port)


def test_page_shows_the_job_and_follows_it_live(browser: ClientConnection, scene: Scene) -> None:
    """The page says which shard the job waits for, and that it reads again later."""
    with opened(browser, scene.url) as page:
        page.until("document.querySelector('#job-rows .now').innerText.includes('reading')")
        page.until(
            "document.querySelector('#verdict-text').innerText.startsWith('No reader is waiting')"
        )
        page.until(
            "document.querySelector('#upcoming-rows').innerText.includes('train-000004.tar')"
        )
        page.until(
            "/of 16 connections\\n.*capacity is/.test(document.querySelector('#limits').innerText)"
        )
        waiting = threading.Thread(target=scene.reader.take, args=(4,))
        waiting.start()
        said = "document.querySelector('#verdict-text').innerText"
        page.until(f"/1 of 1 (reader is waiting|job is short of data): download/.test({said})")
        now = "document.querySelector('#job-rows .now').innerText"
        page.until(f"/waiting, up to .*train-000004.tar/s.test({now})")
        assert "train-000004.tar: downloading" in str(
            page.evaluate("document.querySelector('#waits').innerText")
        )
        page.until("document.querySelector('#verdict.stalled') && true")
        assert "train-000004.tar" in str(
            page.evaluate("document.querySelector('#upcoming-rows').innerText")
        )
        scene.store.let("train-000004.tar")
        waiting.join()
        page.until(
            "document.querySelector('#verdict-text').innerText.startsWith('No reader is waiting')"
        )
        assert {url.partition("/dashboard")[0].rstrip("/") for url in page.requested} == {
            scene.url.rstrip("/")
        }
        assert page.complaints == []


def test_text_of_others_is_shown_as_text(browser: ClientConnection, scene: Scene) -> None:
    """A job that is named like a script is shown by that name, and runs nothing."""
    with opened(browser, scene.url) as page:
        page.until(f"document.querySelector('#job-rows th').innerText.includes({MARKUP[:30]!r})")
        assert page.evaluate("document.querySelectorAll('#main script, #main img').length") == 0
        assert page.evaluate("document.title") == "shardcache"


def test_shards_of_the_same_name_have_a_row_each(browser: ClientConnection, scene: Scene) -> None:
    """Shards that one may not see all have the same name; their rows neither merge nor pile up."""
    with opened(browser, scene.url) as page:
        assert page.evaluate(THRICE) == ["a", "b", "a"]
        assert page.evaluate(ENDINGS) == ["a/train/1.tar", "c/train/1.tar", "2.tar"]


def test_the_keyboard_reaches_everything(browser: ClientConnection, scene: Scene) -> None:
    """The first stop skips to the jobs, and shows that it has the focus."""
    with opened(browser, scene.url) as page:
        page.press("Tab")
        assert page.evaluate(FOCUS) == "skip"
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        page.press("Enter")
        page.until("document.activeElement.id === 'jobs'")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1440, 768, 390])
def test_axe_finds_nothing_serious(
    browser: ClientConnection, scene: Scene, dark: bool, width: int
) -> None:
    """Names, roles, contrast, tables and landmarks pass in both looks and widths."""
    script = (files("axe_core_python") / "axe.min.js").read_text()
    with opened(browser, scene.url, dark=dark, width=width) as page:
        page.evaluate(script)
        found = page.evaluate(AXE)
        assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(BROKEN) == []
        assert (page.evaluate(LIGHTNESS) < 0.2) == dark
        assert page.evaluate("document.getAnimations().length") == 0


def test_page_that_needs_a_token_asks_for_it(
    browser: ClientConnection, tmp_path: Path, scene: Scene
) -> None:
    """A wrong token is refused, the right one opens the page, and the address loses it."""
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    port = free_port()
    with (
        Daemon(tmp_path, "--http", f"127.0.0.1:{port}", "--http-token-file", str(token_file)),
        tab(browser) as page,
    ):
        page.open(f"http://127.0.0.1:{port}/")
        for token in ("not-the-token", TOKEN):
            page.until(
                "document.activeElement.id === 'token-text' && document.activeElement.value === ''"
            )
            page.type(token)
            page.press("Enter")
        page.until("!document.querySelector('#main').hidden")
        assert TOKEN not in "".join(page.requested)
        page.open("about:blank")
        page.open(f"http://127.0.0.1:{port}/#token={TOKEN}")
        page.until("document.querySelector('#main') && !document.querySelector('#main').hidden")
        assert page.evaluate("location.hash") == ""
        assert TOKEN not in "".join(page.requested)


def test_page_shows_an_unreachable_daemon_and_resumes_when_it_is_back(
    browser: ClientConnection, tmp_path: Path
) -> None:
    """Across a restart, without a reload."""
    port = free_port()
    daemon = Daemon(tmp_path, "--http", f"127.0.0.1:{port}")
    with daemon, tab(browser) as page:
        page.open(f"http://127.0.0.1:{port}/")
        page.until("document.querySelector('.live') && true")
        daemon.kill()
        page.until("document.querySelector('#link-text').innerText.includes('does not answer')")
        daemon.start()
        page.until("document.querySelector('#link-text').innerText === 'live'")
