"""`python -m streams.cli`: the command line without an installed script, as child processes are started."""

from __future__ import annotations

from streams.cli import main

if __name__ == "__main__":
    main()
