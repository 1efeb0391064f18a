"""Azure, Google and the Hub, read with any of a user's credentials.

Several jobs of a user may share a daemon, each with credentials of its own. `PermittedOrigin` reads
with the daemon's own credentials and with the credentials that sessions have handed over. It raises
an error only after the store has refused all of these credentials.
"""

from shardcache.origin.cloud.azure_origin import AzureOrigin
from shardcache.origin.cloud.gcs_origin import GcsOrigin
from shardcache.origin.cloud.hub_origin import HubOrigin
from shardcache.origin.permitted_origin import PermittedOrigin


class PermittedAzure(PermittedOrigin):
    """Azure Blob Storage, read with any of a user's secrets."""

    store_class = AzureOrigin


class PermittedGcs(PermittedOrigin):
    """Google Cloud Storage, read with any of a user's keys."""

    store_class = GcsOrigin


class PermittedHub(PermittedOrigin):
    """The Hugging Face Hub, read with any of a user's tokens.

    If a token lacks the permission, the Hub answers that there is no such repository.
    """

    store_class = HubOrigin
