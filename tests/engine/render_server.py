# SPDX-License-Identifier: Apache-2.0
"""A real `vllm launch render`: it returns the tokens of requests, and runs no model."""

from __future__ import annotations

from pathlib import Path

from tests.engine.chat_server import ChatServer
from tests.engine.engine_process import MAX_MODEL_LEN


class RenderServer(ChatServer):
    """A renderer that starts on entry and stops on exit; it has no event sockets."""

    def __init__(self, folder: Path, model: Path, name: str = "chat-tiny") -> None:
        """Prepare the command that starts the renderer.

        Args:
            folder: Where its log is written.
            model: A folder that `write_chat_model` wrote.
            name: The name of the model.
        """
        super().__init__(folder, model, name=name)
        self._module = "vllm.entrypoints.launchers.render.entry"
        self._arguments = [
            *("--model", str(model)),
            *("--served-model-name", name, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-model-len", str(MAX_MODEL_LEN), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        ]
