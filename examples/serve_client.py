"""OpenAI's client and a server of this library: chat, a stream with drafts, a suffix.

    dllm serve nano &
    python examples/serve_client.py http://127.0.0.1:8000/v1

Without an address it starts a server of its own.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from openai import OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    messages: Any = [{"role": "user", "content": "Reverse this list: Tom, Anna, Ben"}]

    answer = client.chat.completions.create(
        model=model, messages=messages, extra_body={"sampler": "localleap"}
    )
    print(answer.choices[0].message.content, answer.model_extra["dllm"])

    options: Any = {"include_drafts": "text", "include_usage": True}
    for chunk in client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options=options
    ):
        extra = (chunk.model_extra or {}).get("dllm", {})
        if extra.get("type") == "step":
            print(f"  step {extra['step']}: {extra['text']}")

    filled = client.completions.create(
        model=model, prompt="23 + 12: 3 + 2 =", suffix=" The answer is 35.", max_tokens=9
    )
    print(filled.choices[0].text)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        command = [sys.executable, "-m", "dllm", "serve", "nano", "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            main(server.stderr.readline().split()[2].rstrip(","))
            server.terminate()
