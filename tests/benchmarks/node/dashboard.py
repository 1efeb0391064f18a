"""The dashboard of a node with many shards and readers: how soon a browser shows it, and what it costs to watch.

The readers do not read: they declare plans, take shards at a modest pace and give them back.
"""

import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from operator import sub
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from websockets.sync.client import ClientConnection

from benchmarks.measure import Row, Target, command, interleaved, tree_cpu_s
from benchmarks.workplace import Daemon, Workplace
from support.monitoring.chromium import PROGRAM, chromium, tab
from support.monitoring.dashboard import follow
from support.network.ports import free_port
from support.programs.raw_session import RawSession
from support.shards.stores import make_hollow_shards

SHARDS, JOBS, READERS = 10_000, 8, 8
LOADS, PAGES = 7, 10
EPOCHS = 2

_URL = "s3://some-bucket/a-dataset/train/shard-{:06d}.tar"
_SHARD_BYTES = 4096
_SHARD_S = 2.0
_WATCHED_S = 30.0
_LIMIT = Target("≤", 5.0)
# Runs before the page's own scripts: notes when the last of what is waited for was drawn, in seconds since the start
# of the navigation. What is drawn shows with the next frame.
_STOPWATCH = """
new MutationObserver(() => {
    const cells = [...document.querySelectorAll("#band-rows td:nth-child(2)")];
    const shards = cells.reduce((total, cell) => total + Number(cell.textContent.replace(/\\D/g, "")), 0);
    if (window.shown || shards < SHARDS || document.querySelectorAll("#job-rows tr").length < JOBS) return;
    window.shown = true;
    requestAnimationFrame(() => requestAnimationFrame(() => { window.shownAfter = performance.now() / 1000; }));
}).observe(document, { subtree: true, childList: true, characterData: true });
"""


def measure(place: Workplace) -> list[Row]:
    """Return the median time to the page, and the processor time of one page and of ten, less that of none."""
    if PROGRAM is None:
        place.say("no Chromium: apt-get install chromium")
        return []
    shards = max(JOBS * READERS, round(SHARDS * place.scale))
    with place.folder() as folder, _node(place, folder, shards) as (daemon, page), chromium() as browser:
        _load(browser, page, shards)  # the first one after the daemon's start has more to wait for
        shown_s = [_load(browser, page, shards) for _ in range(LOADS)]
        contenders = {pages: partial(_watch, daemon, browser, page, pages) for pages in (0, 1, PAGES)}
        percents = interleaved(contenders, lambda text: place.say(f"pages: {text} %"), place.rounds)
    what = f"{shards:,} shards, {JOBS * READERS} readers"
    return [
        Row("dashboard", f"s until shown, {what}", statistics.median(shown_s), target=Target("≤", 1.0)),
        *(
            # More than in the same round without a page: the machine's own load drifts.
            Row(
                "dashboard",
                f"% of a core in the daemon, {pages} pages",
                statistics.median(map(sub, percents[pages], percents[0])),
                target=_LIMIT,
            )
            for pages in (1, PAGES)
        ),
    ]


@contextmanager
def _node(place: Workplace, folder: Path, shards: int) -> Iterator[tuple[Daemon, str]]:
    """A daemon over so many cached shards, with all its readers at work; and its page's address."""
    place.say(f"making up {shards:,} shards")
    refs = make_hollow_shards(folder, map(_URL.format, range(shards)), _SHARD_BYTES)
    (rows := folder / "rows.json").write_text(json.dumps([ref.to_json() for ref in refs]))
    address = f"127.0.0.1:{free_port()}"
    # What is made up would not stand up to being read again.
    env = {"SHARDCACHE_HTTP": address, "SHARDCACHE_SCRUB_RATE": "0"}
    with Daemon(folder, "1TB", env) as daemon:
        readers = command(read_all, socket=str(daemon.socket), shards=str(rows))
        with subprocess.Popen(readers, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
            assert crowd.stdout is not None
            if not crowd.stdout.readline():
                raise RuntimeError("the readers did not start; they have said why on stderr")
            yield daemon, f"http://{address}/"


def _load(browser: ClientConnection, url: str, shards: int) -> float:
    """Open the page as one who never saw it; return after how many seconds jobs and map were drawn."""
    with tab(browser) as page:
        page.look()
        script = f"const SHARDS = {shards}, JOBS = {JOBS}; {_STOPWATCH}"
        page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        page.open(url)
        return float(page.until("window.shownAfter"))


def _watch(daemon: Daemon, browser: ClientConnection, url: str, pages: int) -> float:
    """Return the per cent of a core that the daemon takes while so many pages are open, one of them in the browser."""
    with ExitStack() as stack:
        if pages:
            page = stack.enter_context(tab(browser))
            page.look()
            page.open(url)
            page.until("document.querySelector('.live') && document.querySelector('#band-rows td').innerText")
        for _ in range(pages - 1):
            stack.enter_context(_onlooker(url))
        before_s, began_s = tree_cpu_s(daemon.pid), time.perf_counter()
        time.sleep(_WATCHED_S)
        return 1e2 * (tree_cpu_s(daemon.pid) - before_s) / (time.perf_counter() - began_s)


@contextmanager
def _onlooker(url: str) -> Iterator[None]:
    stop, began = threading.Event(), threading.Event()

    def look() -> None:
        with closing(follow(partial(HTTPConnection, urlsplit(url).netloc))) as events:
            for name, _ in events:
                if name == "map":
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


def read_all(socket: str, shards: str) -> None:
    """Run all readers, each in a thread of its own; print a line once all are at it, and end with the input.

    Args:
        shards: a file with the dataset's rows, see `ShardRef.to_json`.
    """
    rows, stop = json.loads(Path(shards).read_text()), threading.Event()
    ready = threading.Barrier(JOBS * READERS + 1)
    threads = [
        threading.Thread(target=_read, args=(Path(socket), f"job-{job}", rows[number::READERS], ready, stop))
        for job in range(JOBS)
        for number in range(READERS)
    ]
    for thread in threads:
        thread.start()
    ready.wait()
    print("ready", flush=True)
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()


def _read(socket: Path, job: str, rows: Sequence[Any], ready: threading.Barrier, stop: threading.Event) -> None:
    """Go through a part of the dataset, each epoch in another order."""
    source = random.Random(f"{job} {rows[0]}")
    order = [index for _ in range(EPOCHS) for index in source.sample(range(len(rows)), len(rows))]
    with RawSession(socket, job) as session:
        session.ask("plan", epoch=0, shards=rows, order=order, reads=len(rows))
        ready.wait()
        for position in range(len(order)):
            lease = session.take(position)["lease"]
            if stop.wait(_SHARD_S * source.uniform(0.5, 1.5)):
                return
            session.send(type="release", lease=lease)
