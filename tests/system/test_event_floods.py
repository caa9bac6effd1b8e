# SPDX-License-Identifier: Apache-2.0
"""Event sources that speak ZMTP and send messages that no engine sends.

The messages have no end, any number of frames, or come faster than they can be read. Each source costs its own
connection, is named, and takes little memory from the others.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.fake_engine import NewEngine, prompt, stored
from tests.support.fleet import until
from tests.support.flooding import flooding
from tests.support.router_process import RouterProcess

MODEL = "m"
# The most memory that one source may add, whatever it sends: a message of 64 MiB and the bytes between two looks (large
# frames), or 128 MiB of small frames and the bytes until ZMQ has freed them. Without a bound it is gigabytes within
# seconds.
MAX_ADDED_BYTES = 700 * 1024**2
FLOODS = 2


def peak_bytes(pid: int) -> int:
    """Return the most memory that the process had resident. Source: proc(5), VmHWM."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize(
    ("mode", "socket_type", "reason"),
    [
        ("large_frames", "PUB", "without the end of a message"),
        ("empty_frames", "PUB", "does not end|without the end"),
        ("single_frames", "PUB", "does not end|without the end"),
        ("many_frames", "PUB", "more than 16 frames"),
        ("large_frames", "ROUTER", "without the end of a message"),
        ("many_frames", "ROUTER", "more than 16 frames"),
    ],
)
def test_a_source_that_sends_no_message_that_can_be_read_is_cut_off(
    tmp_path: Path, new_engine: NewEngine, mode: str, socket_type: str, reason: str
) -> None:
    with ExitStack() as stack:
        router = stack.enter_context(RouterProcess(tmp_path / "router"))
        quiet, live = new_engine(), new_engine()
        quiet.join(router, "quiet", MODEL)
        port, _ = stack.enter_context(flooding("zmtp_flooder.py", mode, socket_type))
        at = f"tcp://127.0.0.1:{port}"
        noisy = {"worker_id": "noisy", "model": MODEL, "patch_endpoint": "off"}
        noisy |= {"endpoint": at} if socket_type == "PUB" else {"endpoint": live.endpoint, "replay_endpoint": at}
        before = peak_bytes(router.pid)
        router.request("POST", "/register", noisy)
        reasons: set[str] = set()

        def is_cut_again() -> bool:
            reasons.add(router.worker("noisy")["reason"])
            # This fails before the machine runs out of memory.
            assert peak_bytes(router.pid) - before < MAX_ADDED_BYTES
            return router.metric("kvrouter_ingest_floods_total", worker="noisy") >= FLOODS and any(
                part in shown for shown in reasons for part in reason.split("|")
            )

        until(is_cut_again, "the source is cut off, and again when it is back")
        assert any(at in shown and "the connection was closed" in shown for shown in reasons)
        # The quiet worker is not affected.
        tokens = prompt(1, 2)
        router.wait_seen("quiet", quiet.publish(stored(tokens, 0, 2)))
        answer = router.request("POST", "/query", {"model": MODEL, "token_ids": tokens})["instances"]["quiet"]
        assert (answer["gpu"], answer["state"]) == (32, "live")
        assert router.worker("quiet")["gaps"] == 0
        router.unregister("noisy")
        assert "Traceback" not in router.log_tail()
