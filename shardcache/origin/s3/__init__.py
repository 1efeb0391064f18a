"""S3 and compatible object stores."""
