"""Other programs that download objects into files, one process per download.

`AWS_…` variables name the endpoint, the credentials and the trusted authority; all programs check
certificates. s5cmd downloads eight objects at a time, each in parts of its own choice; the others
eight parts of 8 MiB. The time to import a library and to set up its client is not counted.
"""

import asyncio
import os
import resource
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.measure import thread_cpu_s, touch

REQUESTS = 8
PART_BYTES = 8 * 1024 * 1024
# A download that takes longer is stuck.
_LIMIT_S = 600.0
_SAMPLE_S = 0.02


@dataclass(frozen=True, slots=True)
class Task:
    tool: str  # a key of TOOLS
    bucket: str  # of the objects
    objects: dict[str, int]  # size in bytes by key
    folder: str  # destination; a file's name is the last part of its key

    def path(self, key: str) -> str:
        return str(Path(self.folder, Path(key).name))


@dataclass(frozen=True, slots=True)
class Spent:
    """Cost of a download: wall time, processor time, and that of the busiest thread."""

    wall_s: float
    cpu_s: float
    thread_cpu_s: float


def download(**task: Any) -> Spent:
    """Download by one of the programs; return the cost."""
    touch(sum(task["objects"].values()))
    return TOOLS[task["tool"]](Task(**task))


def _s5cmd(task: Task) -> Spent:
    endpoint = ["--endpoint-url", os.environ["AWS_ENDPOINT_URL"]]  # not read from the environment
    command = [
        str(_s5cmd_program()),
        "--log",
        "error",
        *endpoint,
        "--numworkers",
        str(REQUESTS),
        "run",
    ]
    copies = "".join(f"cp s3://{task.bucket}/{key} {task.path(key)}\n" for key in task.objects)
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(copies)
        process.stdin.close()
        busiest_s = _watch(process)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise RuntimeError(f"s5cmd exited {process.returncode}")
    return Spent(time.perf_counter() - started_s, usage.ru_utime + usage.ru_stime, busiest_s)


def _s5cmd_program() -> Path:
    """Return the Go program itself: the script of that name is Python, and slower to start."""
    files = distribution("s5cmd").files or []
    inside = next(
        file
        for file in files
        if file.parent.name == "bin" and file.stem == "s5cmd" and "s5cmd/" in str(file)
    )
    return Path(str(inside.locate())).resolve()


def _watch(process: subprocess.Popen[str]) -> float:
    """Wait for a process to end; return the processor time of its busiest thread."""
    busiest_s = 0.0
    while process.poll() is None:
        with suppress(psutil.Error):  # it has just ended
            busiest_s = max(busiest_s, *thread_cpu_s(process.pid).values())
        time.sleep(_SAMPLE_S)
    return busiest_s


def _awscrt(task: Task) -> Spent:
    from awscrt import auth, http, io, s3

    endpoint = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    tls = None
    if endpoint.scheme == "https":
        context = io.TlsContextOptions()
        context.override_default_trust_store_from_path(ca_filepath=os.environ["AWS_CA_BUNDLE"])
        tls = io.ClientTlsContext(context).new_connection_options()
    client = s3.S3Client(
        region=os.environ["AWS_REGION"],
        credential_provider=auth.AwsCredentialsProvider.new_environment(),
        tls_mode=s3.S3RequestTlsMode.ENABLED if tls else s3.S3RequestTlsMode.DISABLED,
        tls_connection_options=tls,
        part_size=PART_BYTES,
        max_active_connections_override=REQUESTS,
    )

    def get(key: str) -> s3.S3Request:
        request = http.HttpRequest(
            "GET", f"/{task.bucket}/{key}", http.HttpHeaders([("host", endpoint.netloc)])
        )
        return client.make_request(
            type=s3.S3RequestType.GET_OBJECT, request=request, recv_filepath=task.path(key)
        )

    def download() -> None:
        for request in [get(key) for key in task.objects]:
            request.finished_future.result(_LIMIT_S)

    return _spent(download)


def _obstore(task: Task) -> Spent:
    import obstore
    from obstore.store import S3Store

    endpoint_url = os.environ["AWS_ENDPOINT_URL"]
    tls = urlsplit(endpoint_url).scheme == "https"
    trusted = {"root_certificate": Path(os.environ["AWS_CA_BUNDLE"]).read_bytes()} if tls else {}
    store = S3Store(
        task.bucket, endpoint=endpoint_url, client_options={"allow_http": not tls, **trusted}
    )
    free = asyncio.Semaphore(REQUESTS)

    async def get_part(key: str, file: int, start: int, end: int) -> None:
        async with free:
            part = await obstore.get_range_async(store, key, start=start, end=end)
            await asyncio.to_thread(os.pwrite, file, part, start)

    async def get(key: str, size_bytes: int) -> None:
        file = os.open(task.path(key), os.O_WRONLY | os.O_CREAT)
        parts = (
            get_part(key, file, start, min(start + PART_BYTES, size_bytes))
            for start in range(0, size_bytes, PART_BYTES)
        )
        await asyncio.gather(*parts)
        os.close(file)

    async def download() -> None:
        await asyncio.gather(*(get(key, size_bytes) for key, size_bytes in task.objects.items()))

    with asyncio.Runner() as runner:  # its threads are to last until they are counted
        return _spent(lambda: runner.run(download()))


def _spent(download: Callable[[], None]) -> Spent:
    before = thread_cpu_s(os.getpid())
    cpu_s = time.process_time()
    started_s = time.perf_counter()
    download()
    wall_s = time.perf_counter() - started_s
    cpu_s = time.process_time() - cpu_s
    after = thread_cpu_s(os.getpid())
    return Spent(
        wall_s, cpu_s, max(spent_s - before.get(thread, 0.0) for thread, spent_s in after.items())
    )


TOOLS: Mapping[str, Callable[[Task], Spent]] = {
    "s5cmd": _s5cmd,
    "awscrt": _awscrt,
    "obstore": _obstore,
}
