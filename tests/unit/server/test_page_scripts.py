"""The dashboard's words about a moment: its own scripts, run by Node.js without a browser."""

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from shardcache.telemetry.metrics import Counters
from support.programs.guard import GUARD_S

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js: apt-get install nodejs")

DOWNLOADING = "downloading from the object store, limited by --max-bandwidth 1.0 MB/s"
SCRIPT = """
import { figures } from "./summary.js";
import { shortOfData, verdict, level } from "./waits.js";
const moments = JSON.parse(process.argv[2]), reasons = new Map();
console.log(JSON.stringify(moments.map((moment) => {
  const short = shortOfData(moment, reasons);
  const shown = moment.cache ? { figures: figures(moment, { now: 0 }) } : {};
  const text = verdict(moment.jobs, short);
  return { text, level: level(short, []), jobs: [...short.values()], ...shown };
})));
"""


def job(name: str = "a", **facts: Any) -> dict[str, Any]:
    """Return a job of two readers that reads well, but for these facts."""
    return {"name": name, "uid": 0, "sessions": 2, "waiting_share": 0.0} | facts


def wait(job: str = "a", for_s: float = 2.0, reason: str = DOWNLOADING) -> dict[str, Any]:
    """Return one reader's present wait."""
    return {
        "job": job,
        "uid": 0,
        "readers": 1,
        "for_s": for_s,
        "url": "s3://b/1.tar",
        "reason": reason,
    }


def moment(*jobs: dict[str, Any], waits: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """Return what the page is sent, as far as the summary needs it."""
    return {"jobs": list(jobs), "waits": list(waits)}


def judged(folder: Path, *moments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the page says of moments that follow each other."""
    for entry in (files("shardcache.server") / "page").iterdir():
        if entry.name.endswith(".js"):
            (folder / entry.name).write_bytes(entry.read_bytes())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "judge.js").write_text(SCRIPT)
    command = [NODE or "", str(folder / "judge.js"), json.dumps(moments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def test_summary_is_judged_by_the_last_30_seconds(tmp_path: Path) -> None:
    """Jobs that nearly always wait are stalled, even while no single wait is long."""
    starving = job("a", waiting_share=0.94), job("b", waiting_share=0.93)
    found = judged(
        tmp_path,
        moment(*starving, waits=(wait("a", 0.4), wait("b", 1.2))),
        moment(*starving),
        moment(*starving, waits=(wait("b", 0.1),)),
    )
    assert [each["level"] for each in found] == ["stalled"] * 3
    assert {each["text"] for each in found} == {f"2 of 2 jobs are short of data: {DOWNLOADING}."}
    assert [(each["job"], each["readers"], each["share"]) for each in found[1]["jobs"]] == [
        ("a", 2, 0.94),
        ("b", 2, 0.93),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "waits", "level", "text"),
    [
        (0.0, (), "well", "No reader is waiting (2 readers, 1 job)."),
        (0.05, (wait(for_s=0.9),), "well", "No reader is waiting (2 readers, 1 job)."),
        (
            0.06,
            (wait(for_s=1.0, reason="checking: x"),),
            "waiting",
            "1 of 2 readers is waiting: checking.",
        ),
        (0.2, (), "waiting", "1 of 1 job is short of data."),
        (0.33, (wait(for_s=10.0),), "stalled", f"1 of 1 job is short of data: {DOWNLOADING}."),
        (0.5, (), "stalled", "1 of 1 job is short of data."),
    ],
)
def test_summary_tells_a_moment_from_a_shortage(
    tmp_path: Path, share: float, waits: tuple[dict[str, Any], ...], level: str, text: str
) -> None:
    """A one-second wait is shown; a tenth of the time is a shortage, and half is a stall."""
    (found,) = judged(tmp_path, moment(job(waiting_share=share), waits=waits))
    assert found["level"] == level
    assert found["text"] == text


def test_job_without_readers_is_not_short_of_data(tmp_path: Path) -> None:
    """Its last waits are over."""
    (found,) = judged(tmp_path, moment(job(sessions=0, waiting_share=0.9)))
    assert found == {"text": "No job is connected.", "level": "well", "jobs": []}


def test_job_that_reads_its_index_is_waiting(tmp_path: Path) -> None:
    """Its store is named."""
    listing = wait(
        for_s=12.0, reason="listing the shards of s3://bucket; attempt 1 of 10: no answer"
    )
    (found,) = judged(tmp_path, moment(job(waiting_share=0.4, sessions=1), waits=(listing,)))
    assert found["level"] == "stalled"
    assert (
        found["text"]
        == "1 of 1 job is short of data: listing the shards of s3://bucket; attempt 1 of 10."
    )


@pytest.mark.parametrize(
    ("read_bytes", "saved"), [(0, "–"), (11_400_000, "–"), (31_400_000, "20.0 MB")]
)
def test_saved_is_a_dash_until_it_is_positive(tmp_path: Path, read_bytes: int, saved: str) -> None:
    """The words beside it say nothing else: what was fetched ahead has not been saved, nor lost."""
    counters = Counters()
    counters.bills.add_fetched("s3://b/1.tar", 11_400_000, 3)
    counters.bills.add_read("s3://b/1.tar", read_bytes, None)
    bill = counters.bills.to_json()
    cache = {"used_bytes": 0, "capacity_bytes": 1, "shards": 0}
    page = moment() | {
        "cache": cache,
        "counters": counters.to_json(),
        "pins": {"shards": 0},
        "bill": bill,
    }
    (found,) = judged(tmp_path, page)
    assert [row[1:] for row in found["figures"] if row[0] == "Saved"] == [[saved, bill["text"]]]
    assert ("saved" in bill["text"]) is (saved != "–")
