"""Sessions of reading processes over WebSocket."""
