"""Follow an answer while it is written: tokens appear in the order of the model's confidence.

python examples/stream.py
"""

from __future__ import annotations

import dllm

PROMPT = "Tom has 23 apples. Tom buys 12 more. Then Tom loses 7. How many apples does Tom have?"


def main() -> None:
    model = dllm.load("nano")
    assert model.tokenizer is not None
    for event in dllm.stream(model, PROMPT, sampler="threshold", max_new_tokens=64):
        words = {
            position - event.canvas.start: model.tokenizer.decode([token], skip_special_tokens=True)
            for position, token in event.committed.items()
        }
        decided = [f"{position}: {word!r}" for position, word in words.items() if word]
        print(f"step {event.step:2}  {', '.join(decided)}")
        if event.result is not None:
            print(f"\n{event.result.text}\n{event.result.footer()}")


if __name__ == "__main__":
    main()
