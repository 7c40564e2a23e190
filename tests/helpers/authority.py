"""A certificate authority for tests, with files that it has signed."""

from __future__ import annotations

from pathlib import Path

import trustme


class Authority:
    """A certificate authority, and files that it has signed."""

    def __init__(self, folder: Path, name: str) -> None:
        self._authority = trustme.CA(organization_name=name)
        self.file = str(folder / f"{name}-ca.pem")
        self._folder = folder
        self._authority.cert_pem.write_to_path(self.file)

    def sign(self, name: str, *identities: str) -> str:
        """Return a file with a key and a certificate."""
        path = str(self._folder / f"{name}.pem")
        self._authority.issue_cert(*identities, common_name=name).private_key_and_cert_chain_pem.write_to_path(path)
        return path
