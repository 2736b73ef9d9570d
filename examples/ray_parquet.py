"""Answers to a column of prompts, from Parquet to Parquet, with engines as actors of Ray Data.

    python examples/ray_parquet.py [prompts.parquet [answers]]

Without arguments a few prompts are written first.  A data set of Hugging Face goes the same way:
ray.data.from_huggingface(datasets.load_dataset(...)) in place of read_parquet.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import ray

from dllm.serve.ray import Worker

ENGINES = 1  # actors; on GPUs add num_gpus=1 to map_batches
PROMPTS = ["Compute 69 + 49.", "Reverse this list: Tom, Anna, Ben", "Sort this list: Zoe, Ben, Mia"]


def main(source: Path, target: Path) -> None:
    prompts = ray.data.read_parquet(str(source))  # with a column "prompt"
    answers = prompts.map_batches(
        Worker,
        fn_constructor_kwargs={
            "model": "nano", "settings": {"max_batch_size": 16}, "defaults": {"max_tokens": 64},
        },
        batch_size=256, compute=ray.data.ActorPoolStrategy(size=ENGINES),
    )  # fmt: skip
    answers.select_columns(["prompt", "text", "status"]).write_parquet(str(target))
    for row in ray.data.read_parquet(str(target)).take(3):
        print(f"{row['prompt']}\n  {row['text']}")


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    folder = Path(tempfile.mkdtemp())
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "prompts.parquet"
    if len(sys.argv) < 2:
        ray.data.from_items([{"prompt": prompt} for prompt in PROMPTS]).write_parquet(str(source))
    main(source, Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "answers")
