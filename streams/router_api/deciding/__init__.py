"""Deciding: from a parsed request to a rank, its booking and the record of the decision; requests that wait.

What lives here: the router, and what it does for each request. What must not: HTTP (http) and folds (knowledge).
"""
