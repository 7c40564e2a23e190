"""Programs that show how to use kvstreams; each runs as it is."""
