"""Helpers that several tests share: reference implementations, an engine double, an API client."""
