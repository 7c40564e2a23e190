"""Every way in which a router's knowledge can be wrong, with real processes (docs/trust.md has one row per test)."""
