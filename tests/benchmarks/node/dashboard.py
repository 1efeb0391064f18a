"""The dashboard of a node with many shards and readers: how soon it is shown, and what it costs.

The readers do not read: they declare plans, take shards at a modest pace and give them back.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from operator import sub

from websockets.sync.client import ClientConnection

from benchmarks.hollow_shards import make_hollow_shards
from benchmarks.measure import Figure, Row, Target, interleaved, tree_cpu_s
from benchmarks.workplace import Daemon, Workplace
from pictures import URL, Job, reading
from support.monitoring.chromium import PROGRAM, chromium, opened, tab
from support.monitoring.dashboard import follow
from support.network.ports import free_port

SHARDS = 10_000
JOBS = 8
READERS = 8
LOADS = 7
PAGES = 10

_SHARD_BYTES = 4096
_SHARD_S = 2.0
_WATCHED_S = 30.0
# Runs before the page's own scripts: notes when the last of what is waited for was drawn, in
# seconds since the start of the navigation. What is drawn shows with the next frame.
_STOPWATCH = """
new MutationObserver(() => {
    if (window.shown || document.querySelectorAll("#job-rows tr").length < JOBS) return;
    window.shown = true;
    const note = () => { window.shownAfter = performance.now() / 1000; };
    requestAnimationFrame(() => requestAnimationFrame(note));
}).observe(document, { subtree: true, childList: true, characterData: true });
"""


def measure(place: Workplace) -> list[Row]:
    """Return the median time to the page, and the extra processor time of one page and of ten."""
    if PROGRAM is None:
        place.say("no Chromium: apt-get install chromium")
        return []
    shards = max(JOBS * READERS, round(SHARDS * place.scale))
    address = f"127.0.0.1:{free_port()}"
    # What is made up would not stand up to being read again.
    env = {"SHARDCACHE_HTTP": address, "SHARDCACHE_SCRUB_RATE": "0"}
    jobs = [Job(f"job-{number}", READERS, _SHARD_S, shards=shards) for number in range(JOBS)]
    with place.folder() as folder:
        place.say(f"making up {shards:,} shards")
        refs = make_hollow_shards(
            folder, [URL.format("imagenet", number) for number in range(shards)], _SHARD_BYTES
        )
        with (
            Daemon(folder, "1TB", env) as daemon,
            reading(daemon, refs, *jobs),
            chromium() as browser,
        ):
            _load(browser, address)  # the first one after the daemon's start has more to wait for
            shown_s = [_load(browser, address) for _ in range(LOADS)]
            contenders = {
                pages: partial(_watch, daemon, browser, address, pages) for pages in (0, 1, PAGES)
            }
            percents = interleaved(
                contenders, lambda text: place.say(f"pages: {text} %"), place.rounds
            )
    what = f"{shards:,} shards, {JOBS * READERS} readers"
    limit = Target("≤", 5.0)
    rows = [Row("s", f"until shown, {what}", Figure(shown_s), target=Target("≤", 1.0))]
    for pages in (1, PAGES):
        # More than in the same round without a page: the machine's own load drifts.
        percent = Figure(map(sub, percents[pages], percents[0]))
        rows.append(Row("%", f"of a core in the daemon, {pages} pages", percent, target=limit))
    return rows


def _load(browser: ClientConnection, address: str) -> float:
    """Open the page as one who never saw it; return after how many seconds all jobs were drawn."""
    with tab(browser) as page:
        page.look()
        script = f"const JOBS = {JOBS}; {_STOPWATCH}"
        page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        page.open(f"http://{address}/")
        return float(page.until("window.shownAfter"))


def _watch(daemon: Daemon, browser: ClientConnection, address: str, pages: int) -> float:
    """Return the per cent of a core that the daemon takes while so many pages are open."""
    with ExitStack() as stack:
        if pages:
            stack.enter_context(opened(browser, f"http://{address}/"))
        for _ in range(pages - 1):
            stack.enter_context(_onlooker(address))
        before_s = tree_cpu_s(daemon.pid)
        began_s = time.perf_counter()
        time.sleep(_WATCHED_S)
        return 1e2 * (tree_cpu_s(daemon.pid) - before_s) / (time.perf_counter() - began_s)


@contextmanager
def _onlooker(address: str) -> Iterator[None]:
    stop = threading.Event()
    began = threading.Event()

    def look() -> None:
        with closing(follow(partial(HTTPConnection, address))) as events:
            for _ in events:
                began.set()
                if stop.is_set():
                    return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        began.wait()
        yield
    finally:
        stop.set()
        thread.join()
