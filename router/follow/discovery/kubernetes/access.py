# SPDX-License-Identifier: Apache-2.0
"""The access to Kubernetes' API, from the settings and from the pod in which the router runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.regular_file import read_regular
from kvrouter.router.model.workers.engine_answers import bracketed

# Where a pod finds the credentials of its service account.
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The most bytes that are read from the file with the namespace's name. The name has 63 characters at most.
MAX_NAMESPACE_BYTES = 4_096


class Access(msgspec.Struct, frozen=True):
    """The address of the API and the files with the credentials. The files are reread, because tokens expire."""

    url: str
    namespace: str
    token_file: Path | None = None
    ca_file: Path | None = None


def access_from(
    environ: Mapping[str, str],
    *,
    api: str | None,
    namespace: str | None,
    token_file: str | None,
    ca_file: str | None,
    account: Path = ACCOUNT,
) -> Access:
    """Return the access that the settings name, completed from the pod in which the router runs. Raises SettingError.

    Args:
        environ: The environment variables.
        api: The URL of the API; None takes that of the pod's cluster, with the credentials of its service account.
        namespace: The namespace of the workers' pods; None takes the router's own.
        token_file: The file with the token, if one is set.
        ca_file: The file with the certificates that sign the API's, if one is set.
        account: The folder of the pod's service account.
    """
    inside = api is None
    if api is None:
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise SettingError(
                "kubernetes_selector is set, and this is no pod (no KUBERNETES_SERVICE_HOST): set kubernetes_api, like "
                "http://127.0.0.1:8001 of `kubectl proxy`"
            )
        api = f"https://{bracketed(host)}:{port}"
    token = Path(token_file) if token_file else account / "token" if inside else None
    ca = Path(ca_file) if ca_file else account / "ca.crt" if inside else None
    if namespace is None:
        try:
            namespace = read_regular(account / "namespace", MAX_NAMESPACE_BYTES).decode("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            namespace = ""
        if not namespace:
            raise SettingError(f"kubernetes_namespace is missing, and {account} names none: name the pods' namespace")
    return Access(api.rstrip("/"), namespace, token, ca)
