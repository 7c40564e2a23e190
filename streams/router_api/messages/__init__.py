"""Requests and answers of the API: as JSON, as types that check it, and as the values that a router uses.

What lives here: what all other folders may import. What must not: anything that keeps state.
"""
