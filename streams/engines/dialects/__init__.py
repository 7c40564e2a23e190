"""Engine dialects: the bytes of one engine's events to events; pure."""
