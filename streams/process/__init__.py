"""What every process has: logs, metrics, an HTTP server, progress, waiting, fault points of tests."""
