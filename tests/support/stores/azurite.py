"""Azure's own emulator of blobs, Azurite, from npm."""

import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from azure.core.exceptions import AzureError
from azure.storage.blob import BlobServiceClient

from support.network.ports import free_port
from support.programs.guard import GUARD_S

_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azurite_program() -> str | None:
    """Return the program of `npm install azurite`, if it is in $AZURITE or on the path."""
    return os.environ.get("AZURITE") or shutil.which("azurite-blob")


class Azurite:
    """The emulator in memory, with its well-known account; a context manager.

    Attributes:
        client: of the SDK; set on entering.
        connection_string: with the account's key; set on entering.
    """

    client: BlobServiceClient
    connection_string: str

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        port, program = free_port(), azurite_program()
        assert program is not None
        endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
        account = f"AccountName=devstoreaccount1;AccountKey={_KEY};BlobEndpoint={endpoint};"
        self.connection_string = f"DefaultEndpointsProtocol=http;{account}"
        options = ("--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry")
        command = ["node", os.path.realpath(program), "--blobPort", str(port), *options]
        process = subprocess.Popen(command, cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        client = BlobServiceClient.from_connection_string(self.connection_string, retry_total=0)
        self.client = self._stack.enter_context(client)
        deadline_s = time.monotonic() + GUARD_S
        while True:
            try:
                self.client.create_container("bucket")
                return self
            except AzureError:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    self._stack.close()
                    raise
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._stack.close()
