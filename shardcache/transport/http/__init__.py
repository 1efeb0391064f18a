"""HTTP as a worker speaks it: connections, requests, answers into files."""
