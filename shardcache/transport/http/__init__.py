"""HTTP as a transport worker speaks it: connections, requests, answers into files."""
