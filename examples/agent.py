"""An agent of OpenAI's Agents SDK on a server of this library: it calls a tool and answers.

    pip install openai-agents
    dllm serve GSAI-ML/LLaDA-8B-Instruct &
    python examples/agent.py http://127.0.0.1:8000/v1

Without an address it starts a server of `nano`, which never saw a tool in training: `tool_choice`
makes it call one, with numbers of its own.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main(url: str) -> None:
    set_tracing_disabled(True)  # traces would go to OpenAI
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        name = (await client.models.list()).data[0].id
        agent = Agent(
            name="Calculator",
            instructions="Use the tool, then answer.",
            model=OpenAIChatCompletionsModel(name, openai_client=client),
            model_settings=ModelSettings(max_tokens=96, tool_choice="required"),
            tools=[add],
        )  # after its first call the SDK leaves the choice to the model
        result = await Runner.run(agent, "What is 23 + 12?", max_turns=4)
        for item in result.new_items:
            if isinstance(item, ToolCallItem):
                print("call  ", item.raw_item.name, item.raw_item.arguments)
            elif isinstance(item, ToolCallOutputItem):
                print("result", item.output)
        print("answer", result.final_output)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        command = [sys.executable, "-m", "dllm", "serve", "nano", "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            asyncio.run(main(server.stderr.readline().split()[2].rstrip(",")))
            server.terminate()
