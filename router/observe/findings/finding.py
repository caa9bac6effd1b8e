# SPDX-License-Identifier: Apache-2.0
"""One problem of a fleet: its code, the evidence, and the command or flag that fixes it. Pure.

`explanations.py` says what each code means; the page (docs/how-to/doctor.md) lists them, with the code as the anchor.
"""

from __future__ import annotations

import shlex

from kvrouter.contract.diagnosis import Finding, Severity
from kvrouter.router.base.common.escaping import printable

PAGE = "docs/how-to/doctor.md"
# Stands for the router's address in commands. The program that shows a command knows the address by which it reached
# the router.
ROUTER = "ROUTER/"


ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

# Severity and title of each code. KV0 is the router itself, KV1 engines, KV2 their events, KV3 their caches, KV4
# predictions, KV5 Redis, and KV6 other routers.
CODES: dict[str, tuple[Severity, str]] = {
    "KV001": (ERROR, "no router answers"),
    "KV002": (ERROR, "the router refuses this client"),
    "KV003": (WARNING, "client and router have different versions"),
    "KV004": (WARNING, "the clocks of client and router differ"),
    "KV005": (ERROR, "no worker is registered"),
    "KV006": (WARNING, "the router is open to all without an API key"),
    "KV007": (WARNING, "modules are not compiled"),
    "KV008": (ERROR, "a task of the router fails"),
    "KV009": (ERROR, "no worker would take a request"),
    "KV010": (ERROR, "a file of certificate or keys cannot be used"),
    "KV011": (WARNING, "the certificate of the router's port ends"),
    "KV101": (ERROR, "the engine cannot be reached"),
    "KV102": (ERROR, "the engine does not serve the model's name"),
    "KV103": (ERROR, "the router may not follow the worker"),
    "KV104": (ERROR, "the worker is listed and not registered"),
    "KV105": (ERROR, "the worker's circuit breaker is open"),
    "KV106": (WARNING, "the engine's offload disk fails"),
    "KV107": (WARNING, "the clocks of engine and router differ"),
    "KV108": (ERROR, "the worker is registered and not followed here"),
    "KV109": (ERROR, "the engine wants an API key"),
    "KV110": (WARNING, "one engine is registered twice"),
    "KV111": (NOTE, "the worker drains"),
    "KV201": (ERROR, "the worker has no event endpoint"),
    "KV202": (ERROR, "the event endpoint says nothing"),
    "KV203": (ERROR, "the events are those of another engine or rank"),
    "KV204": (ERROR, "event and replay endpoint are swapped"),
    "KV205": (ERROR, "a port of the engine is closed"),
    "KV206": (ERROR, "something else listens at an endpoint"),
    "KV207": (WARNING, "the worker has no replay endpoint"),
    "KV208": (ERROR, "the worker's events are not followed"),
    "KV301": (ERROR, "the engine's block hashes are not understood"),
    "KV302": (WARNING, "the hash scheme is not verified"),
    "KV303": (ERROR, "the catalog of cache groups is incomplete"),
    "KV304": (ERROR, "the hybrid KV cache manager is off"),
    "KV305": (WARNING, "workers of one model have different caches"),
    "KV306": (WARNING, "blocks on CPU or disk earn no credit"),
    "KV307": (WARNING, "the CPU tier is full"),
    "KV308": (ERROR, "blocks find no room in the router's memory"),
    "KV401": (WARNING, "the engine does not report cached tokens"),
    "KV402": (ERROR, "the engine counts other tokens than the router"),
    "KV403": (ERROR, "predictions do not come true"),
    "KV404": (WARNING, "most prompts are shorter than a block"),
    "KV405": (WARNING, "tokens of texts are not known to be the engine's"),
    "KV406": (ERROR, "most text prompts have no tokens"),
    "KV501": (ERROR, "Redis does not do what the router needs"),
    "KV502": (ERROR, "Redis evicts keys"),
    "KV503": (WARNING, "Redis does not persist the index"),
    "KV504": (WARNING, "Redis is short of memory"),
    "KV505": (NOTE, "Redis does not let the router see its settings"),
    "KV506": (ERROR, "Redis holds what no router writes"),
    "KV507": (WARNING, "Redis holds data of another schema"),
    "KV508": (ERROR, "the private store lost the registrations"),
    "KV601": (WARNING, "routers have different versions"),
    "KV602": (ERROR, "routers have different settings"),
    "KV603": (WARNING, "the clocks of Redis and router differ"),
    "KV604": (WARNING, "the load of the other routers is not known"),
    "KV605": (WARNING, "a source of workers cannot be read"),
    "KV606": (WARNING, "sources of workers contradict each other"),
}


def argument(text: str) -> str:
    """Return a name from elsewhere in the form in which it is safe in a command that a person copies into a shell."""
    return shlex.quote(printable(text))


def found(code: str, subject: str, evidence: str, fix: str, severity: Severity | None = None) -> Finding:
    """Return the finding with this code. `severity` replaces the code's usual one."""
    usual, problem = CODES[code]
    return Finding(code, severity or usual, subject, problem, evidence, fix, f"{PAGE}#{code.lower()}")
