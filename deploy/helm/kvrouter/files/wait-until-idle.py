# SPDX-License-Identifier: Apache-2.0
"""The preStop hook of an engine: waits until no request is left, so that none is cut off.

Kubernetes bounds it by the pod's terminationGracePeriodSeconds. The engine is vLLM, or a simulated replica, whose
/metrics has vLLM's names.
"""

import sys
import time
import urllib.request

# Routers learn from their watch that the pod terminates, some milliseconds after it does; a gateway's proxies take longer.
SETTLE_S = 5.0
PERIOD_S = 1.0
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def requests_left(url: str) -> float:
    """Return how many requests the engine at `url` runs or has waiting."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(GAUGES))


time.sleep(SETTLE_S)
while requests_left(sys.argv[1]):
    time.sleep(PERIOD_S)
