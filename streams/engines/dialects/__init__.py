"""Dialects: one module per kind of engine, each of which turns that engine's messages into events. Pure."""
