# SPDX-License-Identifier: Apache-2.0
"""The problems of a fleet, and the meaning of their codes: the answers of `/diagnosis`."""

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


# Descriptions of the fields that findings and explanations share.
CODE, SEVERITY, PROBLEM = "the kind of problem", "error, warning or note", "what is wrong"


class Finding(msgspec.Struct, frozen=True):
    """One problem that a diagnosis found."""

    code: Annotated[str, Meta(description=f"{CODE}; `/diagnosis/CODE` explains it")]
    severity: Annotated[Severity, Meta(description=SEVERITY)]
    subject: Annotated[str, Meta(description="what it is about: a worker, the store, the router")]
    problem: Annotated[str, Meta(description=PROBLEM)]
    evidence: Annotated[str, Meta(description="the facts that show it, as a sentence")]
    fix: Annotated[str, Meta(description="how to fix it: a command or a flag, with ROUTER for this router's address")]
    page: Annotated[str, Meta(description="where the code is listed")]
    workers: Annotated[
        list[str],
        Meta(
            description="the workers that it is about, `w0@1` for rank 1 of w0; empty if it is about no worker in particular"
        ),
    ] = msgspec.field(default_factory=list)
    model: Annotated[
        str | None,
        Meta(description="the model that it is about; null if it is about none, or if the model is not known"),
    ] = None


class DiagnosisReport(msgspec.Struct, frozen=True):
    """The findings of one router process."""

    version: Annotated[str, Meta(description="version of the router")]
    workers: Annotated[int, Meta(description="workers that were examined")]
    routers: Annotated[int, Meta(description="router processes that this one knows of")]
    checks: Annotated[int, Meta(description="codes that a diagnosis can report")]
    findings: Annotated[list[Finding], Meta(description="what was found, the gravest first")]
    age_s: Annotated[float, Meta(description="seconds since the facts were collected; see max_age_s")] = 0.0


class ExplainedCode(msgspec.Struct, frozen=True):
    """The general explanation of one code."""

    code: Annotated[str, Meta(description=CODE)]
    severity: Annotated[Severity, Meta(description=f"{SEVERITY}, in most cases")]
    problem: Annotated[str, Meta(description=PROBLEM)]
    cause: Annotated[str, Meta(description="why the problem arises, and its effect")]
    remedy: Annotated[str, Meta(description="how to remove it")]
