"""The dashboard in a browser, and Prometheus."""
