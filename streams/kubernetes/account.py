"""A pod's service account.

What lives here: where the API server is, and the files that Kubernetes mounts into each pod. What must not: requests
(watching).

State: none. The token is read from its file for each request, because Kubernetes replaces it every hour.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streams.errors import SettingsError
from streams.security.files import read_secret

#: Where Kubernetes puts a pod's service account.
ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """What a pod needs to ask the API server. server: its URL. folder: has the files token, ca.crt and namespace."""

    server: str
    folder: str = ACCOUNT_FOLDER

    @classmethod
    def of_pod(cls, option: str, environ: Mapping[str, str] = os.environ) -> ServiceAccount:
        """Return the account of the pod that this process runs in.

        option: the one that needs it. Raises SettingsError outside of a pod.
        """
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        folder = environ.get("KUBERNETES_SERVICE_ACCOUNT_FOLDER", ACCOUNT_FOLDER)
        if not host or not Path(folder, "token").exists():
            raise SettingsError(
                f"{option}: this process has no service account of Kubernetes",
                remedy="Run it in a pod, or leave the option out",
            )
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", folder)

    def text(self, name: str) -> str:
        """Return the content of one of its files. Raises SettingsError."""
        return read_secret(f"the service account's {name}", str(Path(self.folder, name)))

    def named(self, option: str, text: str) -> tuple[str, str]:
        """Return the namespace and the name of an object: NAMESPACE/NAME, or NAME in the pod's own namespace.

        option: the one that names it. Raises SettingsError.
        """
        namespace, slash, name = text.rpartition("/")
        namespace = namespace if slash else self.text("namespace")
        if not name or not namespace or "/" in namespace:
            raise SettingsError(f"{option} {text!r} is not NAME or NAMESPACE/NAME")
        return namespace, name
