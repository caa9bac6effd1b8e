# SPDX-License-Identifier: Apache-2.0
"""Engine replicas without a model: vLLM's block pool, KV cache groups and event stream, without any computation.

A simulated replica decides what it caches, evicts and reuses exactly as vLLM 0.32 does;
tests/engine/test_simulator_vllm.py compares the two. The router's predictions are checked against these decisions, so
this package imports nothing of `kvrouter.router`: a mistake in shared code would stay hidden.
"""
