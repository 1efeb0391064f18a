"""The status page's numbers in Prometheus' format."""
