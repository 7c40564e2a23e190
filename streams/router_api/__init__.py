"""The router: a read replica of the agents' tables plus the fold of router-loads, behind HTTP (docs/http.md)."""
