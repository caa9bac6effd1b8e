# SPDX-License-Identifier: Apache-2.0
"""Engine replicas without a model: vLLM's block pool, KV cache groups and event stream, and nothing that computes.

A simulated replica decides what it caches, evicts and reuses exactly as vLLM 0.32 does, which
tests/engine/test_simulator_vllm.py holds it to. So it is the engine's truth that the router's predictions are checked
against, and imports nothing of `kvrouter.router`: a shared mistake could otherwise hide itself.
"""
