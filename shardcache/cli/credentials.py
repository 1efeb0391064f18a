"""`shardcache credentials`: keys for the daemon's S3 endpoint.

AWS's SDKs run the command as a `credential_process`, and read the keys from its output.
"""

from pathlib import Path

import click

from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient


@common.examples(
    "credentials",
    "credentials --export",
)
@click.command(short_help="Print keys for the daemon's S3 endpoint.")
@click.option(
    "--export",
    "as_export",
    is_flag=True,
    help="Print shell commands that set the keys and the endpoint. A shell does not renew "
    "its keys.",
)
@common.query_options
def credentials(as_export: bool, as_json: bool, socket: Path | None) -> None:
    """Print keys for the daemon's S3 endpoint, as a credential_process does.

    The keys are your own: what they may read is what the daemon lets you read. With the line
    `credential_process = shardcache credentials` in ~/.aws/config, AWS SDKs and tools fetch the
    keys and renew them. For the current shell: eval "$(shardcache credentials --export)".
    """
    client = AdminClient(socket)
    keys = client.credentials()
    if not as_export:
        common.print_json(keys)
        return
    address = client.status()["s3"]
    click.echo(f"export AWS_ACCESS_KEY_ID={keys['AccessKeyId']}")
    click.echo(f"export AWS_SECRET_ACCESS_KEY={keys['SecretAccessKey']}")
    click.echo("unset AWS_SESSION_TOKEN")
    click.echo(f"export AWS_ENDPOINT_URL_S3=http://{address}")
    click.echo(f"export S3_ENDPOINT_URL=http://{address}")  # s5cmd's name for the endpoint
    click.echo("export AWS_REGION=${AWS_REGION:-us-east-1}")
