# SPDX-License-Identifier: Apache-2.0
"""The problems of a fleet: the answer of `/diagnosis`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta


class Severity(StrEnum):
    """The severity of a finding."""

    # Requests fail, or reuse is lost or mispredicted.
    ERROR = "error"
    # The fleet works, but this should be fixed.
    WARNING = "warning"
    # Nothing has to be done; something is not known.
    NOTE = "note"


class Finding(msgspec.Struct, frozen=True):
    """One problem that a diagnosis found."""

    code: Annotated[str, Meta(description="the kind of problem; `kvrouter doctor --explain CODE` explains it")]
    severity: Annotated[Severity, Meta(description="error, warning or note")]
    subject: Annotated[str, Meta(description="what it is about: a worker, the store, the router")]
    problem: Annotated[str, Meta(description="what is wrong")]
    evidence: Annotated[str, Meta(description="the facts that show it, as a sentence")]
    fix: Annotated[str, Meta(description="the command or flag that mends it, with ROUTER for this router's address")]
    page: Annotated[str, Meta(description="where the code is listed")]


class DiagnosisReport(msgspec.Struct, frozen=True):
    """The findings of one router process."""

    version: Annotated[str, Meta(description="version of the router")]
    workers: Annotated[int, Meta(description="workers that were examined")]
    routers: Annotated[int, Meta(description="router processes that this one knows of")]
    checks: Annotated[int, Meta(description="codes that a diagnosis can report")]
    findings: Annotated[list[Finding], Meta(description="what was found, the gravest first")]
