# SPDX-License-Identifier: Apache-2.0
"""The explanation of each code of a diagnosis, for `kvrouter doctor --explain CODE` and `GET /diagnosis/CODE`.

These texts are the only place that explains a code; pages name the code and refer here. File names in them are pages.
"""

from __future__ import annotations

import difflib

import msgspec

from kvrouter.contract.diagnosis import ExplainedCode
from kvrouter.router.base.common.errors import UnknownCode
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.observe.findings.finding import CODES

# How many codes an error suggests, and how many characters of an unknown code it shows.
NEAREST = 3
SHOWN_CHARS = 20


class Explanation(msgspec.Struct, frozen=True):
    """The meaning of a code in general; the evidence and the fix of a finding are about one case."""

    # Why the problem arises and its effect, in sentences.
    cause: str
    # How to remove it, in sentences.
    remedy: str


# The explanation of each code, in the order of the codes.
EXPLANATIONS: dict[str, Explanation] = {
    "KV001": Explanation(
        "Nothing listens at the address, or the program that listens there is no router. The evidence has the "
        "error of the connection. A router listens on 127.0.0.1 unless --host names another address.",
        "Start the router with `kvrouter serve`, or name its address: `kvrouter doctor --url http://HOST:PORT`. "
        "To be reached from another machine, the router needs `--host 0.0.0.0` and an open port.",
    ),
    "KV002": Explanation(
        "The router has API keys. The command sent none, an unknown one, or one without the scope `watch` "
        "(docs/reference/http.md).",
        "Pass the router's key with `--api-key KEY` or the variable KVROUTER_API_KEY.",
    ),
    "KV003": Explanation(
        "The command and the router have different versions, so their answers may have other fields. A router "
        "without `/diagnosis` cannot be examined: only the client's part is reported.",
        "Install the router's version here, or update the router.",
    ),
    "KV004": Explanation(
        "The two clocks differ by more than 5 s, by the `Date` of the router's answer. Routing reads no wall "
        "clock. Logs and traces do, and so do chat templates that write the date: two machines then make "
        "different tokens of one prompt.",
        "Run NTP on both machines: `timedatectl set-ntp true`.",
    ),
    "KV005": Explanation(
        "No flag, file, Kubernetes API or `POST /register` named a worker.",
        "Name the workers in one of the ways of docs/how-to/discovery.md, such as `kvrouter serve --worker "
        "w0=http://HOST:8000`.",
    ),
    "KV006": Explanation(
        "The router listens on all addresses without an API key. Everybody who reaches the machine may send "
        "requests and register workers.",
        "Set `--api-key KEY` (or KVROUTER_API_KEY), or listen on a private address, such as `--host 127.0.0.1` "
        "(docs/how-to/hardening.md).",
    ),
    "KV007": Explanation(
        "Some modules run as plain Python, because the router was installed without a C compiler or with "
        "KVROUTER_COMPILE=0, as `make demo` does. Questions and events take many times longer "
        "(docs/reference/benchmarks.md).",
        "Install the wheel of this platform; or install a C compiler and Python's headers (Debian: gcc "
        "python3-dev), and then install the router again without KVROUTER_COMPILE=0 (in a clone: `make "
        ".venv/installed`).",
    ),
    "KV008": Explanation(
        "A task of the router ended. This is a defect of the router. The task was started again "
        "(docs/reference/states.md), and the log has its traceback.",
        "Report the defect with the traceback. Restart the router if the problem stays.",
    ),
    "KV009": Explanation(
        "Engines are up and no breaker is open, but all workers drain, or all have another role, such as "
        "`prefill`. `/ready` answers 503.",
        "End a drain with `kvrouter undrain`, or add workers that decode.",
    ),
    "KV010": Explanation(
        "The settings file, `tls_certificate`, `tls_key`, `tls_client_ca`, `api_keys_file`, `worker_api_keys_file` or a "
        "file of the gateway was changed, and its new contents cannot be used. The evidence names the file and the "
        "reason. The router uses the former contents until it can read the file or is restarted, so a key that you "
        "revoked stays valid until then. While certificate and key are replaced, they may for a moment not belong "
        'together. "no answer in 5 s" means that a mount hangs.',
        "Correct the file. The router reads it again as soon as it changes.",
    ),
    "KV011": Explanation(
        "The certificate of the router's port ends soon: within two weeks, or within the last fifth of a shorter "
        "life. After its end, clients refuse it, and the finding is an error.",
        "Put a new certificate in the same place. The router takes it without a restart. `openssl x509 -enddate "
        "-noout -in FILE` shows when a certificate ends.",
    ),
    "KV012": Explanation(
        "The values of the settings that the evidence names have changed in the settings file since the router was "
        "started. The router still uses the former values. Settings that docs/reference/settings.md marks as `reloads` "
        "were applied.",
        "Restart the router, or put the former values back.",
    ),
    "KV101": Explanation(
        "The engine's `/health` or `/metrics` does not answer this router, or answers with an error. The engine "
        "gets no requests, and its event ports are not judged meanwhile.",
        "Start the engine, or open the way to it from the router's machine (test: `curl -i URL/health`). If it "
        "moved or is gone, change it in its source (`--worker`, a file, Kubernetes). If a client registered it, change "
        "its `url` with `PATCH /workers/ID`, or remove it with `kvrouter remove ID`.",
    ),
    "KV102": Explanation(
        "The engine's `/v1/models` lists other names than the worker is registered for, so requests get 404 there.",
        "Start the engine with that `--served-model-name`, or register the worker with the engine's own name "
        "(`model=`). `--model-alias` keeps the other name.",
    ),
    "KV103": Explanation(
        "An address of the worker's registration is not in this router's `allow_hosts`. The worker was registered "
        "through a router with another setting, or before the setting was made.",
        "List the address with `--allow-host HOST` on all routers of this Redis, or register the worker with a "
        "listed address.",
    ),
    "KV104": Explanation(
        "A source (flags, a file, Kubernetes) lists the worker, but its model is not known, because the engine "
        "does not answer, wants an API key, does not speak TLS, or is no engine (`no engine answers there`); or "
        "the fleet refuses it.",
        "The fix of the finding depends on the reason. Start the engine, give the worker its `model`, or correct "
        "`url`: it is the engine's own `http://HOST:PORT`, not that of an ingress or of another program.",
    ),
    "KV105": Explanation(
        "Requests to the worker failed one after the other, or its answers broke off, so it gets no requests for "
        "now (docs/reference/proxy.md).",
        "Look for the failed requests in the engine's log. Test the engine: `curl -i URL/v1/models`.",
    ),
    "KV106": Explanation(
        "The engine's metrics report records that were damaged in the last ten minutes, or a disk that is left "
        "alone after errors. No damaged record was loaded (docs/reference/offload-tier.md).",
        "Check the disk of the folder that the engine's log names (smartctl, dmesg), then restart the engine.",
    ),
    "KV107": Explanation(
        "The two clocks differ by more than 5 s, by the `Date` of the engine's `/health`. The effects are those "
        "of KV004.",
        "Run NTP on both machines: `timedatectl set-ntp true`.",
    ),
    "KV108": Explanation(
        "Another router registered the worker. This router already follows `max_workers` workers, or cannot read "
        "the registration. The worker is not in this router's answers.",
        "Raise `--max-workers`, or register fewer workers. If the registration cannot be read, register the "
        "worker again.",
    ),
    "KV109": Explanation(
        "The engine's `/v1/models` answers the router with 401 or 403: it was started with `--api-key`, or a "
        "program before it checks keys. The router has no key for it, or a wrong one. The router's own requests "
        "are refused, so texts get no tokens and no prediction. A client's request is sent with the client's own "
        "key, or is refused too. `/health` is degraded meanwhile.",
        "Give the router the engines' key: `--worker-api-key KEY` on all routers, or `--worker-api-keys-file` where "
        "engines have different keys or where keys change.",
    ),
    "KV110": Explanation(
        "Two workers of one model have the same `url` and rank, so one engine is taken for two: the router counts "
        "its load in two parts and spreads prompts over both. Addresses are compared by their text. Workers of "
        "one engine may differ in rank or model.",
        "Keep one registration for each engine: `DELETE /workers/ID`, or remove the other from its source. An "
        "adapter or another name of the model needs no worker (`--model-alias`).",
    ),
    "KV111": Explanation(
        "The worker gets no new requests, because a client or its source drains it. The evidence has the time "
        "since then, as far as this router knows. This is only a note.",
        "Nothing has to be done. If the worker is to take requests again: `kvrouter undrain`, or `PATCH "
        '/workers/ID` with {"state": "active"}.',
    ),
    "KV112": Explanation(
        "The worker answered at least a tenth of its last requests with a status of 400 to 499, which is at least four "
        "times the share of the other workers of its model. The last 128 answers of each worker within ten minutes "
        "count, if there are at least 32 on each side; so large a difference is not chance. Either its engine has "
        "another version or other flags, such as a shorter context, or one client's wrong requests begin alike or are "
        "of one session, so that the router sends them all to one worker. It is only a note if more than half of the "
        "refused requests have the same API key and session, or have neither.",
        "Find the refused requests in the engine's log. Start the engine with the version and flags of its peers "
        "(`--max-model-len`, adapters, tools, API key). If the requests themselves are wrong, correct their "
        "client, which the access log names by its API key (`--access-log`).",
    ),
    "KV113": Explanation(
        "`model_aliases` (`--model-alias NAME=MODEL`) gives a further name to a model or adapter that no worker serves, so "
        "requests for that name get 404. Either the model is misspelled, or its workers were removed or serve another "
        "name. The finding waits while an engine may be starting: while a source lists a worker whose model is not known, "
        "and for ten minutes while a registered engine has not listed its adapters.",
        "Correct or remove the alias on all routers. In the settings file, the change applies without a restart. Or start a "
        "worker that serves the model: `GET /v1/models` lists all names that requests may use.",
    ),
    "KV201": Explanation(
        "The engine's events are off, or their endpoint was not registered. The router knows only what it sent "
        "there itself, and marks predictions `approximate`.",
        "Start the engine with `--kv-events-config`. An engine that names its endpoints (vLLM from 0.31 on) needs "
        "nothing else, unless a client registered the worker. For other engines, register `events` and `replay`.",
    ),
    "KV202": Explanation(
        "Either the engine's metrics page says that prefix caching is off (`vllm:cache_config_info`), so it "
        "stores no block; this is known at once. Or there is a connection, and the engine computed at least three "
        "prompts that must have stored blocks, but no event came since its process started: prefix caching or "
        "events are off, or the endpoint is another engine's. Where neither the page nor the registration names "
        "the block size, only prompts of 2,048 tokens and more count.",
        "Start the engine with prefix caching and events on, and register the endpoint that this engine publishes on.",
    ),
    "KV203": Explanation(
        "Two workers have one endpoint, or the endpoint belongs to another engine by that engine's own word, or "
        "the events name another data-parallel rank. The worker is `mismatched`, and no event of it earns credit "
        "(docs/how-to/discovery.md).",
        "Register each worker with the endpoints of its own engine and rank. Engines that name them (vLLM from "
        "0.31 on) show them at `/kv_event_sources`.",
    ),
    "KV204": Explanation(
        "A ZMQ socket names its type when a peer connects. The event endpoint must publish (PUB, XPUB), and the "
        "replay endpoint must answer (ROUTER): here they are the other way round.",
        "Register the worker with `events` and `replay` exchanged.",
    ),
    "KV205": Explanation(
        "The router cannot connect to the port, although the engine is not down: a firewall, a network policy, a "
        "port that the container does not publish, or an engine that runs without it.",
        "Open the port between the router and the engine. If the engine itself names other endpoints "
        "(`/kv_event_sources`), the finding's fix shows them: register these.",
    ),
    "KV206": Explanation(
        "A program that does not speak ZMQ, such as the engine's HTTP port, or a ZMQ socket of the wrong type "
        "listens at the endpoint.",
        "Register the port of `--kv-events-config` for this endpoint: PUB or XPUB for `events`, ROUTER for "
        "`replay`. If the engine itself names its endpoints (`/kv_event_sources`), the finding's fix shows them.",
    ),
    "KV207": Explanation(
        "Lost events cannot be read again, so a gap or a restart of the router voids what was known of the worker.",
        "Add `replay_endpoint` to the engine's `--kv-events-config` and register it as `replay`; or install the "
        "engine patch, which sends snapshots instead.",
    ),
    "KV208": Explanation(
        "The worker is `connecting`, `suspect` or `resyncing` (docs/reference/states.md), for the reason in the "
        "evidence. During a start or a takeover this is over in seconds. Closed ports are reported as KV205 "
        "instead.",
        "Run the doctor again after some seconds. If the finding stays, check that the router can reach the "
        "endpoint: firewall, network policy, published ports.",
    ),
    "KV209": Explanation(
        "The engine announces AllBlocksCleared several times a second. Each time the router drops all that the worker "
        "holds, so predictions stay near 0. If the engine does reset its cache so often, it reuses nothing; if it does "
        "not, its events are broken.",
        "Look at the engine's log for resets of the prefix cache, and stop their cause. If there are none, install "
        "another version of the engine.",
    ),
    "KV301": Explanation(
        "No known hash scheme and seed gives the hashes that the engine announces. vLLM runs with its own "
        "PYTHONHASHSEED, or with another `--prefix-caching-hash-algo`. SGLang has no seed, and both of its schemes "
        "are tried, so the engine is of another kind or version. Or its events have extra keys (salts, adapters, "
        "media) of a form that this router does not know; then the evidence shows the form.",
        "For vLLM, state both: `kvrouter serve --none-hash-seed SEED`, or for one worker `none_hash_seed=` and "
        "`hash_algo=` in `--worker`. Or install the engine patch, which declares them. For SGLang, check "
        "`engine=sglang`, and its version (docs/how-to/sglang.md). For extra keys, install a newer router.",
    ),
    "KV302": Explanation(
        "The worker holds blocks, and none came that could be compared: the first block of a plain prompt with "
        "its token ids. If the assumed scheme is wrong, no hit is found.",
        "Send the worker one prompt of plain text that it does not have yet. If that changes nothing, state "
        "`none_hash_seed` and `hash_algo`, or install the engine patch.",
    ),
    "KV303": Explanation(
        "A block size, a window or a chunk size of a cache group is missing, contradicts itself, or is not the one that "
        "the worker was registered with, so no hit can be promised. The evidence names it, with both numbers.",
        "Register the worker with its catalog (docs/reference/http.md), or install the engine patch, which "
        "declares it.",
    ),
    "KV304": Explanation(
        "The engine has one group of full attention, although its model has several kinds of layers: every layer "
        "keeps all blocks, and the cache holds far fewer prompts. vLLM does not report this; three signs show it. "
        "Two are certain and give an error: the group of full attention has a window, or another worker of the "
        "model has several groups. One is a hint and gives a warning: the name that the engine loaded its model "
        "from (`root` in `/v1/models`), or the model's name, is that of a known hybrid family. A hybrid model "
        "with a name of its own is not found if it runs alone, or if the manager is off in all its engines.",
        "Start the engine without `--disable-hybrid-kv-cache-manager`. Some KV connectors turn the manager off by "
        "themselves.",
    ),
    "KV305": Explanation(
        "One group has another kind, block size, window or chunk size in two workers. Each worker is predicted "
        "correctly, but their engines differ in version or flags.",
        "Start all engines of a model with the same version, `--block-size` and cache flags, or give the others "
        "another model name.",
    ),
    "KV306": Explanation(
        "The router does not know by which rule the engine looks up blocks on CPU or disk, so it counts none of "
        "them (docs/reference/wire.md).",
        "Register `offload_connector` and `offload_blocks_per_chunk` in the worker's catalog, as the engine is "
        "started, or install the engine patch.",
    ),
    "KV307": Explanation(
        "In the last ten minutes the engine could not store chunks in its CPU tier, because requests use all "
        "slots and none could be freed. A tier that is full and evicts works as it should and is not reported. "
        "Only the offload tier of this project reports this (`vllm:kvrouter_offload_stores_refused_total`); of "
        "other connectors the router knows what they hold, not how much they could.",
        "Give the tier more memory (`cpu_bytes_to_use` of the engine's `--kv-transfer-config`), or send the "
        "engine fewer requests at a time.",
    ),
    "KV308": Explanation(
        "The router's index reached `mirror_budget_bytes`. Blocks that did not fit earn no credit.",
        "Raise `--mirror-budget-bytes` (docs/how-to/sizing.md).",
    ),
    "KV309": Explanation(
        "The engines lend the blocks of their CPU tiers (`peer_port`, docs/how-to/offload.md), but some differ in model, layout "
        "or hash seed, or their caches were reset a different number of times. Such engines fetch nothing from each other, "
        "because the blocks may be those of other weights; each prompt is computed where it is not cached.",
        "Start all engines of the model with the same model files, cache flags and `PYTHONHASHSEED`. If an engine was restarted, "
        "or reset more often than the others, reset or restart all of them. For a moment during an update of weights, the "
        "finding is normal.",
    ),
    "KV401": Explanation(
        "The engine's answers do not say how many tokens were cached, so nothing verifies the predictions "
        "(docs/explanation/quality.md). The finding ends with the engine's process, as KV402 and KV403 do.",
        "Start the engine with `--enable-prompt-tokens-details`.",
    ),
    "KV402": Explanation(
        "Most of the last prompts had another length at the engine, so its tokenizer or chat template differs "
        "from the router's. A gateway may also translate requests after the router has picked the engine.",
        "Give the router the engine's tokenizer folder with its chat template (`--tokenizer MODEL=FOLDER`), or "
        "none, so that the engine tokenizes (docs/how-to/tokenizers.md). Name the paths that a gateway translates in "
        "`gateway_translated_paths` (docs/how-to/gateway.md).",
    ),
    "KV403": Explanation(
        "The engine reuses less than the router predicted. The evidence says how often, and whether the requests "
        "were alone at the engine (docs/explanation/quality.md).",
        "Start engines and router with the same PYTHONHASHSEED (`--none-hash-seed`) and hash algorithm, and "
        "register each engine's own event endpoint. If the engine's cache is too small for its load, give it more "
        "memory or add replicas.",
    ),
    "KV404": Explanation(
        "More than half of at least 32 prompts were shorter than the unit in which the model's cache is reused "
        "(`align` in `/workers`; some hundred tokens for models with Mamba layers). Nothing of them can be "
        "reused. Lengths are counted by powers of two, rounded in the prompts' favour.",
        "Nothing has to be done if prompts are so short. Send parts of one conversation as one prompt. A smaller "
        "`--block-size` makes the unit smaller where the model allows it.",
    ),
    "KV405": Explanation(
        "The router's tokenizer, or the engine's `/tokenize`, makes other tokens of a probe than the engine does; "
        "or engines of one model differ; or there is no engine to compare with (docs/explanation/tokens.md).",
        "Start all engines of the model with the same chat template and flags. With vLLM, `--enable-scale-out` "
        "gives the engine a render endpoint, and nothing else is needed. A `--tokenizer MODEL=FOLDER` of the "
        "router must name the engine's own files.",
    ),
    "KV406": Explanation(
        "More than half of the last 64 texts of a model (at least 8) were placed by load alone, because their "
        "tokens were not found; so no reuse is predicted for them. The evidence has the usual reason. Requests "
        "that the engine refuses or that are placed by load by design, and prompts with media or `prompt_embeds`, do not "
        "count.",
        "Follow the finding's fix, which depends on the reason; docs/how-to/tokenizers.md lists the reasons. "
        "Usual ones are a missing `--worker-api-key`, and no tokenizer in engine or router (`--enable-scale-out`, "
        "`--tokenizer MODEL=FOLDER`, `--renderer MODEL=URL`). The finding ends when its cause has ended, with texts that get "
        "tokens, or after ten minutes without texts.",
    ),
    "KV407": Explanation(
        "The engine reuses prompts for which nothing was predicted: more than half of the last 8 to 16 prompts that it "
        "reused while each was alone there, with the worker live and nothing withholding its credit. No prediction "
        "promises too much, but prompts are sent away from the worker that holds them.",
        "If these prompts have a `cache_salt`, also one that the router makes, the engine's version ignores it at their "
        "path (as old versions do at `/v1/messages`), and all tenants share one cache: update the engine. "
        "If the engine stored blocks before the router followed it, give it a replay endpoint or the engine patch. If "
        "neither holds, report it: docs/how-to/doctor.md says how.",
    ),
    "KV408": Explanation(
        "vLLM may run behind a front end in Rust (`VLLM_USE_RUST_FRONTEND=1`), which answers 404 to the endpoints that "
        "return the tokens of a request. The router uses the front end's `/tokenize` where probes show that it agrees with the "
        "engine; other texts are placed by load. Token ids are placed exactly.",
        "Give the router the engine's tokenizer folder (`--tokenizer MODEL=FOLDER`), or a renderer of the engine's model "
        "(`--renderer MODEL=URL`, docs/how-to/tokenizers.md), or start vLLM with its front end in Python and "
        "`--enable-scale-out`.",
    ),
    "KV409": Explanation(
        "The router converts a body of `/v1/responses` into the same chat as vLLM, and probes compare the tokens of that "
        "chat with the engine's. They differ for these requests, so no reuse is predicted for them. Usual causes are vLLM before "
        "0.25, a template that writes a whole tool call, whose keys `/tokenize` has in another order, or SGLang, which reads "
        "such bodies in another way. The finding begins with the first such request, and ends when a worker can read them.",
        "Start vLLM 0.31 or later with `--enable-scale-out`, or give the router the engine's tokenizer folder "
        "(`--tokenizer MODEL=FOLDER`) or a renderer (`--renderer MODEL=URL`). For SGLang, have clients send `x-session-id`: it "
        "keeps a conversation at its worker.",
    ),
    "KV410": Explanation(
        "A renderer that the settings name (`--renderer MODEL=URL`) does not answer, has no render endpoints, wants an API "
        "key, or makes other tokens of a probe than an engine of the model. It is not used for what it gets wrong; the "
        "engines are queried in its place where they return tokens, and other texts are placed by load.",
        "Start the renderer (`vllm launch render`, `vllm-rs render`) with the engines' model, version, chat template and "
        "flags. The router tries it again by itself, at least every 30 seconds. If it wants an API key, name the key: "
        "`--renderer MODEL=URL,key=NAME`, with NAME of `--worker-api-keys-file`.",
    ),
    "KV501": Explanation(
        "Redis does not answer, or it takes no commits. Answers continue from memory; other routers learn "
        "nothing, and new workers cannot be registered.",
        "Start Redis, or correct `--redis`. If it runs, read its log: disk full, out of memory, or a replica that "
        "was promoted.",
    ),
    "KV502": Explanation(
        "The `maxmemory-policy` of Redis is not `noeviction`, so blocks of the index may vanish unnoticed.",
        "`redis-cli CONFIG SET maxmemory-policy noeviction`, and the same in redis.conf.",
    ),
    "KV503": Explanation(
        "Redis keeps no append-only file and saves no snapshots, or its last write to disk failed. Without "
        "persistence, workers that registered themselves are gone after its restart.",
        "`redis-cli CONFIG SET appendonly yes`, and the same in redis.conf. If a write failed, free space on the "
        "disk of Redis and read its log.",
    ),
    "KV504": Explanation(
        "Redis uses more than nine tenths of `maxmemory`, or of the machine's memory where it has no `maxmemory`. "
        "At the limit it refuses commits, and other routers learn nothing.",
        "Raise `maxmemory`, or move Redis to a larger machine.",
    ),
    "KV505": Explanation(
        "The ACL of the router's user forbids `CONFIG GET` or `TIME`, as that of docs/how-to/hardening.md does. "
        "So persistence without an append-only file, or the clock, is not known. This is only a note.",
        "`redis-cli ACL SETUSER NAME +info +config|get +time`, or check these settings by hand.",
    ),
    "KV506": Explanation(
        "The registry in Redis has an entry that no router can read (docs/reference/states.md). The evidence "
        "names key and value.",
        "Delete the key or correct the value, and give this Redis database to routers alone.",
    ),
    "KV507": Explanation(
        "Routers of another version use this Redis, or did: during an upgrade, after it, or after going back. It "
        "may also be a registration of the former schema that could not be taken over.",
        "Finish the upgrade: replace the routers of the other version, then remove what they left "
        "(docs/how-to/upgrade.md).",
    ),
    "KV508": Explanation(
        "No worker is registered, although some were when a router last used this `data_dir`: the append-only "
        "file has lost its manifest, or has a FLUSHDB, so Valkey loaded an empty store without an error. "
        "`/health` is degraded until a worker is registered, or until the file `workers-registered` in `data_dir` "
        "is deleted and the router restarted.",
        "Register the workers again (`POST /register`), or name them in a source, which brings them back by "
        "itself. If none is missing, delete the file.",
    ),
    "KV601": Explanation(
        "The heartbeats of the routers in Redis name different versions. During a rolling update this is as it "
        "should be; answers may have different fields.",
        "Install the same version on all routers, and restart them in turn.",
    ),
    "KV602": Explanation(
        "A setting that decides hits, choices, or which router follows a worker differs, so an answer depends on "
        "the router that a client reaches. Compared are `none_hash_seed` (by a digest), `policy`, `temperature`, "
        "`saturation_tokens`, `suspect_credit_s`, `approximate_ttl_s`, `lease_ttl_s`, `max_workers`, "
        "`handover_token_cost`, `remote_prefill_min_tokens`, `allow_hosts`, `model_aliases`, and whether there is "
        "an `api_key`, an `api_keys_file`, a `worker_api_key` and a `worker_api_keys_file`.",
        "Start all routers on this Redis with the same value.",
    ),
    "KV603": Explanation(
        "The clocks of Redis and the router differ by more than 5 s. The effects are those of KV004.",
        "Run NTP on both machines: `timedatectl set-ntp true`.",
    ),
    "KV604": Explanation(
        "The router does not know the requests of the other routers. Each router counts its own requests alone, "
        "so several may choose one worker at the same moment. Not reported while Redis is away (KV501).",
        "See `kvrouter doctor --explain KV501`: the load is shared through Redis.",
    ),
    "KV605": Explanation(
        "A file or the API of Kubernetes does not answer as it should. The workers last known stay "
        "(docs/how-to/discovery.md).",
        "Correct the file, or the router's access to Kubernetes.",
    ),
    "KV606": Explanation(
        "Two sources describe one worker differently, or routers were given different lists. "
        "docs/how-to/discovery.md says which one counts.",
        "Name each worker in one source alone, and give all routers the same lists.",
    ),
}


def explained_code(name: str) -> ExplainedCode:
    """Return the meaning of a code, in upper or lower case. Raises UnknownCode."""
    code = name.upper()
    if code not in CODES:
        nearest = ", ".join(difflib.get_close_matches(code, CODES, NEAREST))
        hint = f"did you mean {nearest}?" if nearest else f"codes are like {next(iter(CODES))}"
        raise UnknownCode(f"no finding has the code {printable(name[:SHOWN_CHARS])!r}; {hint}")
    severity, problem = CODES[code]
    explanation = EXPLANATIONS[code]
    return ExplainedCode(code, severity, problem, explanation.cause, explanation.remedy)
