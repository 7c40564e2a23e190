"""Answering HTTP: the calls of docs/http.md, their bodies, limits, pages, metrics and traces.

What lives here: what clients send and receive. What must not: choosing a rank (deciding) and bookings (sharing).
"""
