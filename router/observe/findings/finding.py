# SPDX-License-Identifier: Apache-2.0
"""One problem of a fleet: its code, the evidence, and the command or flag that fixes it. Pure.

`explanations.py` says what each code means; the page (docs/how-to/doctor.md) lists them, with the code as the anchor.
"""

from __future__ import annotations

import shlex

from kvrouter.contract.diagnosis import Finding, Severity
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.observe.findings.subject import Subject

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
    "KV010": (ERROR, "a file of settings, certificate or keys cannot be used"),
    "KV011": (WARNING, "the certificate of the router's port ends"),
    "KV012": (WARNING, "changed settings wait for a restart"),
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
    "KV112": (WARNING, "the worker refuses more requests than its peers"),
    "KV113": (WARNING, "an alias stands for no served model"),
    "KV201": (ERROR, "the worker has no event endpoint"),
    "KV202": (ERROR, "the event endpoint says nothing"),
    "KV203": (ERROR, "the events are those of another engine or rank"),
    "KV204": (ERROR, "event and replay endpoint are swapped"),
    "KV205": (ERROR, "a port of the engine is closed"),
    "KV206": (ERROR, "something else listens at an endpoint"),
    "KV207": (WARNING, "the worker has no replay endpoint"),
    "KV208": (ERROR, "the worker's events are not followed"),
    "KV209": (ERROR, "the engine clears its cache all the time"),
    "KV301": (ERROR, "the engine's block hashes are not understood"),
    "KV302": (WARNING, "the hash scheme is not verified"),
    "KV303": (ERROR, "the catalog of cache groups is incomplete or wrong"),
    "KV304": (ERROR, "the hybrid KV cache manager is off"),
    "KV305": (WARNING, "workers of one model have different caches"),
    "KV306": (WARNING, "blocks on CPU or disk earn no credit"),
    "KV307": (WARNING, "the CPU tier is full"),
    "KV308": (ERROR, "blocks find no room in the router's memory"),
    "KV309": (WARNING, "workers of one model cannot exchange blocks"),
    "KV401": (WARNING, "the engine does not report cached tokens"),
    "KV402": (ERROR, "the engine counts other tokens than the router"),
    "KV403": (ERROR, "predictions do not come true"),
    "KV404": (WARNING, "most prompts are shorter than a block"),
    "KV405": (WARNING, "tokens of texts are not known to be the engine's"),
    "KV406": (ERROR, "most text prompts have no tokens"),
    "KV407": (WARNING, "the engine reuses more than is predicted"),
    "KV408": (WARNING, "the engine's front end has no render endpoints"),
    "KV409": (WARNING, "requests to /v1/responses are placed by load"),
    "KV410": (WARNING, "a renderer is away or differs"),
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

# The fix of each code that has one fix in every case; the checks write the others.
FIXES = {
    "KV001": "kvrouter serve; or name its address: kvrouter doctor --url http://HOST:PORT; from another machine, it must"
    " listen on --host 0.0.0.0, and its port be open",
    "KV002": "kvrouter doctor --api-key KEY (or KVROUTER_API_KEY), the key that it was started with",
    "KV006": "kvrouter serve --api-key KEY (or KVROUTER_API_KEY), or --host 127.0.0.1",
    "KV007": "install the wheel of this platform; or gcc and Python's headers (Debian: gcc python3-dev), and then the "
    "router again, without KVROUTER_COMPILE=0 (in a clone: make .venv/installed)",
    "KV008": "report it with the traceback in the router's log; restart the router if it stays",
    "KV010": "correct the file; it is read again as soon as it changes",
    "KV011": "openssl x509 -enddate -noout -in FILE shows when one ends",
    "KV012": "restart the router, or put the former values back into the settings file",
    "KV103": "kvrouter serve --allow-host HOST (all routers of this Redis), or register the worker with a listed address",
    "KV106": "check the disk of the folder that the engine's log names (smartctl, dmesg), then restart the engine",
    "KV108": "kvrouter serve --max-workers N, with more than now, or register fewer; if its registration cannot be read,"
    " register it again",
    "KV109": "kvrouter serve --worker-api-key KEY, or correct its key in --worker-api-keys-file (all routers)",
    "KV209": "find in the engine's log who resets the cache (POST /reset_prefix_cache, sleep, updates of weights); if nobody "
    "does, its events are broken: update the engine",
    "KV302": "send it one prompt of plain text that it does not have yet; if that changes nothing, state none_hash_seed "
    "and hash_algo, or install the engine patch",
    "KV303": 'register the worker with its catalog: {"catalog": {"groups": [{"kind": ..., "block_size": ...}]}} '
    "(docs/reference/http.md), or install the engine patch, which declares it",
    "KV305": "start all engines of a model with the same version, --block-size and cache flags, or give the others "
    "another model name",
    "KV306": 'register {"catalog": {"offload_connector": NAME, "offload_blocks_per_chunk": N}} as the engine is started,'
    " or install the engine patch",
    "KV307": "give the tier more memory (cpu_bytes_to_use of its --kv-transfer-config), or send the engine fewer "
    "requests at a time",
    "KV308": "kvrouter serve --mirror-budget-bytes N, with more than now",
    "KV309": "start all engines of the model with the same model, flags and PYTHONHASHSEED; if one was reset more often than "
    "the others (/reset_prefix_cache, an update of weights), reset or restart all of them",
    "KV404": "if they belong to one conversation or share a preamble, send them as one prompt; a smaller --block-size "
    "makes the unit smaller where the model allows it",
    "KV405": "start all engines of the model with the same chat template and flags; where the engine has a render "
    "endpoint, nothing else is needed; kvrouter serve --tokenizer MODEL=FOLDER must name the engine's own files",
    "KV408": "kvrouter serve --tokenizer MODEL=FOLDER with the engine's own files, or --renderer MODEL=URL with a server "
    "that vllm launch render starts with the engine's model and flags, or start the engine with its front end in Python (without "
    "VLLM_USE_RUST_FRONTEND) and --enable-scale-out",
    "KV410": "start vllm launch render with the engines' model, version, chat template and flags, where the router can reach it; "
    "if it wants an API key: --renderer MODEL=URL,key=NAME, with NAME of --worker-api-keys-file",
    "KV501": "start it, or correct --redis; what the server's log says: disk full, out of memory, or a replica that was "
    "promoted",
    "KV506": "delete the key or correct the value, and give this Redis database to routers alone",
    "KV507": "finish the upgrade: replace the routers of the other version, then remove what they left "
    "(docs/how-to/upgrade.md)",
    "KV508": "register the workers again (POST /register), or name them in a source, which brings them back by itself: "
    "--worker, --workers-file; if none is missing, delete the file that the evidence names",
    "KV601": "install the same version on all, and restart them in turn",
    "KV604": "see what KV501 says of Redis; the load is shared through it",
    "KV605": "correct the file, or the router's access to Kubernetes",
    "KV606": "name each worker in one source alone, and give all routers the same lists",
}


def argument(text: str) -> str:
    """Return a name from elsewhere in the form in which it is safe in a command that a person copies into a shell."""
    return shlex.quote(printable(text))


def found(code: str, subject: Subject | str, evidence: str, fix: str = "", severity: Severity | None = None) -> Finding:
    """Return the finding with this code.

    Args:
        code: One of CODES.
        subject: The subject; a plain text names no worker and no model.
        evidence: The facts that show it.
        fix: Replaces the code's usual fix.
        severity: Replaces the code's usual severity.
    """
    usual, problem = CODES[code]
    page = f"{PAGE}#{code.lower()}"
    text, workers, model = subject if isinstance(subject, Subject) else Subject(subject)
    return Finding(code, severity or usual, text, problem, evidence, fix or FIXES[code], page, list(workers), model)
