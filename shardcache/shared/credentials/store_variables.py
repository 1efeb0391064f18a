"""Environment variables by which a process reaches object stores.

`private` hashes the values of these variables, so that processes with different values get
different private daemons, each of which serves one user. The client imports this module, so it uses
the standard library alone.
"""

import re

# Variables from which the stores' clients take credentials, endpoints, proxies and certificates,
# and from which shardcache takes its options.
_STORE_VARIABLES = re.compile(
    "|".join(
        (
            r"(?:AWS|AZURE|MSI|IDENTITY|GOOGLE|GCLOUD|CLOUDSDK|GCS|FSSPEC|OCI|OSS|SHARDCACHE)_\w+",
            r"HF_(?:TOKEN|TOKEN_PATH|HOME|ENDPOINT)",
            r"HUGGING_FACE_HUB_TOKEN",
            r"(?:https?|ftp|all|no)_proxy",
            r"(?:REQUESTS|CURL)_CA_BUNDLE",
            r"SSL_CERT_(?:FILE|DIR)",
            r"STORAGE_EMULATOR_HOST",
            r"BOTO_CONFIG",
            r"NETRC",
            r"KRB5CCNAME",
        ),
    ),
    re.IGNORECASE,
)
# Variables with such names that do not matter: those that say to which job a process belongs, those
# that only shardcache's client reads, and keys of other services, such as language models.
_EXCEPTIONS = re.compile(
    r"AWS_(?:BATCH|EXECUTION|LAMBDA|BEARER_TOKEN)_\w+|SHARDCACHE_(?:SOCKET|JOB|TUNE_MALLOC)"
    r"|(?:AZURE|GOOGLE)_(?:\w+_)?API_KEY",
)


def reaches_stores(variable: str) -> bool:
    """Return True if a variable decides which stores a process reaches, or with which rights."""
    if _EXCEPTIONS.fullmatch(variable):
        return False
    return _STORE_VARIABLES.fullmatch(variable) is not None
