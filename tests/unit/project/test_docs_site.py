"""The documentation site: it builds without a warning, and its reference leaves nothing out."""

import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import click
import pytest

import shardcache_client
from shardcache import errors
from shardcache.access.rules import AllowRule
from shardcache.cli.main import app
from shardcache.config.origin_table import OriginTable
from shardcache.config.settings import Settings
from shardcache.errors import ShardcacheError
from support import ROOT
from support.monitoring.chromium import PROGRAM, chromium, tab
from support.programs.guard import GUARD_S

pytestmark = pytest.mark.slow

# What users type, words and whole questions, and the page or section that answers it.
SEARCHED = {
    "checkpoint": "how-do-i.html#save-a-checkpoint-and-resume",
    "resume": "how-do-i.html#save-a-checkpoint-and-resume",
    "progress bar": "how-do-i.html#show-a-progress-bar-that-is-right-after-a-resume",
    "validation": "how-do-i.html#validate-after-each-epoch",
    "distributed evaluation": "how-do-i.html#evaluate-on-several-ranks-each-sample-exactly-once",
    "distributedsampler": "how-do-i.html#get-a-sample-by-its-number",
    "captions": "how-do-i.html#read-only-the-captions",
    "mix": "how-do-i.html#mix-datasets-by-weight",
    "tensor parallel": "how-do-i.html#train-with-tensor-or-pipeline-parallelism",
    "notebook": "how-do-i.html#look-at-a-batch-before-training",
    "weights": "how-do-i.html#load-a-model-s-weights",
    "DuckDB": "how-do-i.html#query-parquet-with-duckdb-or-pandas",
    "Slurm": "how-do-i.html#run-under-slurm",
    "shard size": "how-do-i.html#how-large-a-shard",
    "glob": "how-do-i.html#which-form-of-url",
    "slow": "how-do-i.html#why-is-it-waiting",
    "tokenizer": "how-do-i.html#train-a-language-model-on-packed-tokens",
    "augmentation": "how-do-i.html#decode-images",
    "Lightning": "frameworks.html",
    "webdataset": "coming-from.html",
    "out of memory": "out-of-space.html",
    "docker": "deploy-kubernetes.html",
    "disk full": "out-of-space.html",
    "how big should shards be": "how-do-i.html#how-large-a-shard",
    "duplicate samples": "wrong-samples.html#samples-come-twice",
    "install": "install.html",
    "pip install": "install.html",
    "conda": "install.html",
    "uninstall": "install.html",
    "botocore conflict": "install.html",
    "getting started": "quick-start.html",
    "train on images with Lightning": "tutorial.html",
    "gpu utilization": "why-waiting.html",
    "why is training so slow": "why-waiting.html",
    "data loading bottleneck": "why-waiting.html",
    "how do I resume training": "how-do-i.html#save-a-checkpoint-and-resume",
    "spot instances": "how-do-i.html#save-a-checkpoint-and-resume",
    "permission denied": "no-answer.html#access-is-denied",
    "NCCL timeout": "ranks-disagree.html",
    "bus error": "out-of-space.html#workers-end-with-bus-error-or-memory-runs-out",
    "no space left": "out-of-space.html#the-disk-is-full",
    "corrupt tar": "refused-shards.html",
    "daemon not running": "no-answer.html#the-daemon-does-not-answer",
    "clear the cache": "day-two.html#make-room",
    "prometheus": "metrics.html",
    "helm chart": "deploy-kubernetes.html",
    "s3 credentials": "how-do-i.html#use-credentials-or-an-endpoint-of-my-own",
    "minio": "how-do-i.html#use-credentials-or-an-endpoint-of-my-own",
    "what is a shard": "epochs.html",
    "shuffle across shards": "how-do-i.html#shuffle-more-thoroughly",
    "how many workers": "how-do-i.html#how-many-workers",
    "how much disk do I need": "how-do-i.html#how-large-a-cache",
    "convert imagenet": "how-do-i.html#write-shards",
    "mosaicml": "coming-from.html",
    "lhotse": "coming-from.html",
    "huggingface dataset": "coming-from.html",
    "multiple datasets": "how-do-i.html#read-several-datasets-as-one",
    "upgrade": "day-two.html#upgrade",
    "compare with webdataset": "features.html",
    "environment variables": "settings.html",
    "different number of gpus": "tuning.html#another-number-of-gpus",
    "first epoch slow": "stalls.html#the-first-epoch-is-slow",
    "shared memory": "out-of-space.html#workers-end-with-bus-error-or-memory-runs-out",
    "one download for all nodes": "cluster.html",
    "is it secure": "security.html",
    "exit code": "commands.html",
    "python api": "python.html",
    "alternatives": "features.html",
    "threads or processes": "workers.html",
    "private daemon": "private-daemon.html",
    "which daemon": "how-do-i.html#which-daemon",
    "egress cost": "costs.html",
    "simulate": "commands.html#simulate",
    "what happens when a node dies": "tier-faults.html#a-node-dies",
    "global shuffle": "how-do-i.html#shuffle-more-thoroughly",
    "can I read parquet files": "formats.html",
    "tfrecord": "formats.html#tfrecord-and-arrayrecord",
    "jsonl": "formats.html",
    "azure blob storage": "install.html",
    "google cloud storage": "install.html",
    "video": "how-do-i.html#read-a-few-frames-of-a-video",
    "audio": "how-do-i.html#batch-recordings-or-texts-of-different-lengths",
    "pack sequences without padding": "how-do-i.html#train-a-language-model-on-packed-tokens",
    "llm pretraining": "how-do-i.html#train-a-language-model-on-packed-tokens",
    "imagenet": "cookbook/photos-lightning/README.html",
    "torchrun": "how-do-i.html#use-several-gpus",
    "accelerate": "frameworks.html#accelerate",
    "fsdp": "frameworks.html",
    "jax": "frameworks.html#jax",
    "ray": "frameworks.html#a-ray-cluster",
    "reproducible shuffle seed": "how-do-i.html#get-another-order-or-the-same-again",
    "skip corrupted images": "how-do-i.html#skip-samples-that-are-damaged-or-incomplete",
    "download data before training starts": (
        "how-do-i.html#have-the-data-there-before-the-job-starts"
    ),
    "keep shards in the cache": "day-two.html#pin-shards",
    "subset of the dataset": "how-do-i.html#try-it-on-a-few-samples",
    "filter samples": "how-do-i.html#choose-samples-by-size-or-metadata",
    "class imbalance": "how-do-i.html#mix-datasets-by-weight",
    "nfs": "how-do-i.html#which-form-of-url",
    "behind a proxy": "how-do-i.html#use-a-proxy-or-a-certificate-of-my-own",
    "ssl certificate verify failed": "how-do-i.html#use-a-proxy-or-a-certificate-of-my-own",
    "no internet access": "how-do-i.html#use-a-proxy-or-a-certificate-of-my-own",
    "grafana": "metrics.html",
    "stop the daemon": "commands.html#stop",
    "limit bandwidth": "tuning.html#bandwidth",
    "limit disk usage": "how-do-i.html#how-large-a-cache",
    "is my data encrypted": "security.html",
    "what happens if the daemon crashes": "how-it-works.html",
    "safetensors": "how-do-i.html#load-a-model-s-weights",
    "boto3": "s3-endpoint.html",
    "apptainer": "deploy-slurm.html",
    "multiple users on one machine": "deploy-systemd.html",
    "macos": "install.html",
    "which python version": "install.html",
    "data loader hangs": "stalls.html#a-reader-waits",
    "dataloader worker killed": "out-of-space.html#workers-end-with-bus-error-or-memory-runs-out",
    "object versions": "urls.html",
    "deterministic": "how-do-i.html#get-another-order-or-the-same-again",
    "403": "no-answer.html#access-is-denied",
    "LRU": "how-it-works.html#how-the-next-fetch-is-chosen",
    "eviction policy": "how-it-works.html#how-the-next-fetch-is-chosen",
    "too many open files": "out-of-space.html#workers-end-with-bus-error-or-memory-runs-out",
    "sampling weights": "how-do-i.html#mix-datasets-by-weight",
    "multi node training": "how-do-i.html#use-several-gpus",
    "sharded evaluation": "how-do-i.html#evaluate-on-several-ranks-each-sample-exactly-once",
    "dataset too large for disk": "how-do-i.html#how-large-a-cache",
    "job hangs": "stalls.html#a-reader-waits",
}
# Widths of a phone, a tablet and a desk, in light and dark: pages take them in turn.
LOOKS = [(390, False), (390, True), (768, False), (768, True), (1440, False), (1440, True)]
FOUND = """location.search === '?q=' + encodeURIComponent(%r)
    && document.querySelector('.search-summary').innerText
    && [...document.querySelectorAll('ul.search > li > a')]
        .map((a) => a.getAttribute('href').split('?')[0])"""


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, page: str) -> str:
        return (self.folder / f"{page}.html").read_text()

    def text(self, page: str, anchor: str) -> str:
        """Return what a list says of the name with an anchor, and the name itself."""
        found = re.search(
            rf'<dt id="{re.escape(anchor)}">(.*?</dt><dd>.*?)</dd>', self[page], re.DOTALL
        )
        assert found is not None, f"{page}.html has nothing at #{anchor}"
        return " ".join(unescape(re.sub(r"<[^>]+>", "", found[1])).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site, built as `make docs` does: a link or an anchor that leads nowhere is an error."""
    for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(package, reason="the site is built with pip install 'shardcache[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        folder / "trees",
        "docs",
        folder / "out",
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GUARD_S)
    assert built.returncode == 0, built.stderr
    return Site(folder / "out")


def every_option(command: click.Command = app, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield each option of each command: the command's name, the anchor, and every spelling."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from every_option(each, f"{name}-{each.name}".lstrip("-"))
    else:
        for param in command.get_params(click.Context(command)):
            if isinstance(param, click.Option) and "--help" not in param.opts:
                yield (
                    name,
                    f"{name}-{param.opts[0].lstrip('-')}",
                    " ".join([*param.opts, *param.secondary_opts]),
                )


def test_every_command_and_option_is_on_its_page(site: Site) -> None:
    """Whoever looks up an option finds it, with all its spellings and what it does."""
    options = list(every_option())
    assert len(options) > 60
    for command, anchor, spellings in options:
        assert f'<section id="{command}">' in site["commands"]
        entry = site.text("commands", anchor)
        assert [spelling for spelling in spellings.split() if spelling not in entry] == []
        assert len(entry) > len(spellings) + 10


def test_every_way_to_set_an_option_is_on_its_page(site: Site) -> None:
    """Each option has its flag, variable and key; `[[origin]]` keys are the file's alone."""
    for name in Settings.model_fields.keys() - {"origin"}:
        flag = name.replace("_", "-")
        entry = site.text("settings", flag)
        assert f"--{flag} " in entry
        assert f"SHARDCACHE_{name.upper()} " in entry
        assert f"{name} in the file" in entry
    for name in OriginTable.model_fields:
        assert "SHARDCACHE_" not in site.text("settings", name.replace("_", "-"))


def test_keys_of_allow_rules_are_on_the_page() -> None:
    """An `[[allow]]` table takes the keys on the page, and nothing else."""
    page = (ROOT / "docs" / "settings.md").read_text()
    table = page.partition("## `[[allow]]`")[2].partition("\n## ")[0]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    rule = AllowRule.parse({key: "s3://a/" if key == "prefix" else [0] for key in keys})
    assert rule == AllowRule("s3://a/", frozenset({0}), frozenset({0}))


def test_every_public_name_is_on_its_page(site: Site) -> None:
    """Every importable name of the client is described, and each dataset argument."""
    assert [
        name
        for name in shardcache_client.__all__
        if f'id="shardcache_client.{name}"' not in site["python"]
    ] == []
    text = unescape(re.sub(r"<[^>]+>", "", site["python"]))
    dataset = text.partition("class ShardDataset")[2].partition("Batches of similar length")[0]
    described = dataset.partition("Parameters:")[2].partition("Raises:")[0]
    assert [
        name for name in arguments_of_dataset() if not re.search(rf"\b{name}\b", described)
    ] == []
    signature = dataset.partition("Parameters:")[0]
    assert [
        name for name in arguments_of_dataset() if not re.search(rf"\b{name}: ", signature)
    ] == []
    assert "shuffle_window: int | None = None," in signature


def arguments_of_dataset() -> set[str]:
    return inspect.signature(shardcache_client.ShardDataset).parameters.keys() - {"self"}


def test_every_error_is_on_its_page(site: Site) -> None:
    """Each class of error can be looked up by its name, and what to do by its class."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ShardcacheError)
    ]
    assert len(kinds) > 30
    for kind in kinds:
        entry = site.text("errors", kind.__name__.lower())
        assert f"Code {kind.code}" in entry
        assert kind.default_remedy.replace("`", "") in entry


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")
def test_search_finds_the_page_for_the_words_of_users(site: Site) -> None:
    """The right page is in the site search's first three results, above internals."""
    with chromium() as browser, tab(browser) as page:
        for word, answer in SEARCHED.items():
            page.open(f"{(site.folder / 'search.html').as_uri()}?q={quote(word)}")
            found = page.until(FOUND % word)
            first = [
                result
                for result in found[:3]
                if result == answer or result.startswith(f"{answer}#")
            ]
            assert first, (word, found[:3])
            assert not {"architecture.html", "changelog.html", "contributing.html"} & {
                *found[:2]
            }, (word, found)


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")
def test_axe_finds_nothing_on_any_page(site: Site) -> None:
    """Names, roles, contrast and keyboards pass on each page in one of the looks."""
    axe = (files("axe_core_python") / "axe.min.js").read_text()
    not_written = {site.folder / "genindex.html", site.folder / "search.html"}
    pages = sorted(set(site.folder.glob("*.html")) - not_written) + sorted(
        site.folder.glob("cookbook/**/*.html")
    )
    assert len(pages) > 50
    with chromium() as browser, tab(browser) as page:
        for path, (width, dark) in zip(pages, itertools.cycle(LOOKS), strict=False):
            page.look(width=width, dark=dark)
            page.open(path.as_uri())
            page.until(f"document.readyState === 'complete' && location.href === '{path.as_uri()}'")
            page.evaluate(axe)
            found = page.evaluate(
                "axe.run(document, {resultTypes: ['violations']}).then((all) => all.violations)"
            )
            assert [(each["id"], each["nodes"][0]["html"]) for each in found] == [], (
                path,
                width,
                dark,
            )
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
