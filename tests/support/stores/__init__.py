"""Object stores and web servers, real and made to misbehave."""


def aws_env(
    endpoint_url: str, access_key: str = "test", secret_key: str = "test"
) -> dict[str, str]:
    """Return the variables that lead an AWS SDK to a server, by default one for all keys."""
    return {
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint_url,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
