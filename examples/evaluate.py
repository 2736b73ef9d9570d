"""lm-evaluation-harness on a local task, with two samplers: swapping one is one word.

    pip install -c constraints.txt '.[eval]' && python examples/evaluate.py

The task is made of generated questions, so nothing is downloaded; any task of the harness works the
same way, with `tasks=["gsm8k"]` and a real checkpoint.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

from dllm.eval.harness import DLLM
from dllm.eval.tasks import TASKS

TASK = """
task: reverse_lists
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 32}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def main() -> None:
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "questions.jsonl"
        examples = TASKS["reverse"].examples(16)
        lines = [json.dumps({"prompt": e.prompt, "answer": e.answer}) for e in examples]
        file.write_text("\n".join(lines) + "\n")
        (Path(folder) / "task.yaml").write_text(TASK.format(file=file))
        manager = TaskManager(include_path=folder, include_defaults=False)
        for sampler in ("llada", "threshold(tau=0.9)"):
            lm = DLLM("nano", sampler=sampler)
            result = lm_eval.simple_evaluate(
                lm, tasks=["reverse_lists"], task_manager=manager, apply_chat_template=True
            )
            score = result["results"]["reverse_lists"]["exact_match,none"]
            print(f"{sampler:20} exact match {score:.2f}, {lm.usage.nfe} forwards")


if __name__ == "__main__":
    main()
