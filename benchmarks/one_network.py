"""An autoregressive model with an adapter for masks, as the three things it is.

    python benchmarks/one_network.py --model BASE --adapter examples/smollm2-diffusion \
        --answers answers.jsonl

``answers``: JSON lines {"ids", "answer"} of the base model's own greedy answers, of which one
prompt in ``--held-out`` was never trained on.  Measured on these prompts, nothing here is a time:
as its own drafter, lossless; bits per token of the masks by offset, beside the base model's; and as
a diffusion model, decided tokens first: what every sampler takes in forwards, and what the base
model says of the text that it wrote, token by token: the share that is its own greedy choice, and
its log-likelihood.  What the results hold already of the same adapter and prompts is kept, so it
can be interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllm
from dllm.errors import DllmError
from dllm.train.dflash.data import Answer, Taps, collate, loops, read_answers
from dllm.train.dflash.evaluate import matches, walk
from dllm.train.objectives.gated import MaskBlocks

MASKS = 3  # that the adapter was trained on
WINDOW = f"dcd(s_init={MASKS + 1}, s_max={MASKS + 1})"  # the token after the text, and the masks
SAMPLERS = (
    *(f"threshold({tau})+{WINDOW}" for tau in (0.9, 0.7, 0.5)),
    *(f"{name}+{WINDOW}" for name in (
        "localleap", "klass", "eb", "factor", "dparallel", "hierarchical",
        "credit+threshold(0.7)", "stability+threshold(0.7)", "streaming", "d3llm",
    )), "wedlm",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "one_network.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--count", type=int, default=20, help="answers for drafts and bits")
    parser.add_argument("--prompts", type=int, default=8, help="of these, decoded by diffusion")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--samplers", nargs="*", default=SAMPLERS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    base = dllm.load(given.model, dtype="bfloat16")
    both = dllm.load(given.model, dtype="bfloat16", adapter=given.adapter)
    held = [a for a in read_answers(given.answers) if a.held_out(given.held_out)]
    held = [a for a in held if a.tokens >= 8 and not loops(a.ids[a.start :])][: given.count]
    prompts = [np.asarray(a.ids[: a.start]) for a in held[: given.prompts]]
    weights = (Path(given.adapter) / "adapter_model.safetensors").read_bytes()
    setting = {"adapter": hashlib.sha256(weights).hexdigest()[:16], "answers": len(held),
               "tokens": sum(a.tokens for a in held), "prompts": len(prompts),
               "most": given.tokens}  # fmt: skip
    result: dict[str, Any] = {}
    if given.output.exists():
        result = json.loads(given.output.read_text(encoding="utf-8"))
    if not setting.items() <= result.items():
        result = setting | masks(both, held)
        plain = dllm.speculate(base, None, prompts, max_new_tokens=given.tokens, chat=False)
        own = dllm.speculate(both, f"self(masks={MASKS})", prompts, max_new_tokens=given.tokens,
                             controller="whole", chat=False)  # fmt: skip
        assert [r.tokens for r in own] == [r.tokens for r in plain], "drafting is not lossless"
        result["rows"] = {"plain": judged(base, plain), "drafts itself": judged(base, own)}
    rows = result["rows"]
    for sampler in given.samplers:
        if sampler in rows:
            continue
        try:
            written = dllm.generate(
                both, prompts, sampler=sampler, cache="wedlm", chat=False,
                max_new_tokens=given.tokens, block_length=given.tokens,
            )  # fmt: skip
        except DllmError as error:
            print(f"{sampler}: {error}")
            continue
        rows[sampler] = judged(base, written)
        print(line(sampler, rows[sampler]), flush=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("| | tokens per forward | greedy choices | nats per token |\n| --- | --- | --- | --- |")
    print("\n".join(line(name, row) for name, row in rows.items()))


def line(name: str, row: dict[str, float]) -> str:
    return (f"| `{name}` | {row['tokens_per_forward']:.2f} | {100 * row['greedy']:.1f} % | "
            f"{row['nats']:.2f} |")  # fmt: skip


@torch.inference_mode()
def masks(model: dllm.DiffusionModel, held: list[Answer]) -> dict[str, Any]:
    """Tokens per forward of walks through the answers; by offset of a mask how often it is right,
    its bits per token, and the base model's, which has seen every token before."""
    hf: Any = model.hf
    blocks = MaskBlocks(hf, hf.adapter_gate, MASKS)
    head = hf.get_output_embeddings().weight
    sums = torch.zeros(3, MASKS)  # right, bits, bits of the base model
    seen, tokens, rounds = torch.zeros(MASKS), 0, 0
    for answer in held:
        batch = collate([answer], [range(answer.start, len(answer.ids) - 1)], Taps((), 0))
        ids, anchors = batch["ids"], batch["anchors"]
        states = blocks.read(ids)
        teacher = (states[0].to(head.dtype) @ head.T).float().log_softmax(-1)
        hidden = blocks(ids, states, anchors)[0]
        own = (hidden.to(head.dtype) @ head.T).float().log_softmax(-1)
        hits = matches(answer, own.argmax(-1))
        accepted = walk(hits)
        tokens, rounds = tokens + sum(accepted) + len(accepted), rounds + len(accepted)
        at = anchors[0, :, None] + torch.arange(1, MASKS + 1)
        inside, label = hits >= 0, ids[0, at.clamp_max(ids.shape[1] - 1)]
        bits = -own.gather(-1, label[..., None])[..., 0] / np.log(2)
        of_base = -teacher[at.clamp_max(ids.shape[1] - 1) - 1].gather(-1, label[..., None])[..., 0]
        parts = torch.stack([(hits > 0).float(), bits, of_base / np.log(2)])
        sums += (parts * inside).sum(1)
        seen += inside.sum(0)
    shares = (sums / seen).round(decimals=4).tolist()
    return {"tokens_per_forward": tokens / rounds,
            **dict(zip(("right", "bits", "bits_of_base"), shares, strict=True))}  # fmt: skip


@torch.inference_mode()
def judged(base: dllm.DiffusionModel, results: Any) -> dict[str, float]:
    """Tokens per forward, and what the base model says of the texts."""
    hf: Any = base.hf
    greedy = nats = tokens = forwards = 0.0
    for result in results:
        start = result.prompt_length
        ids = [*result.sequences[:start].tolist(), *result.tokens]
        text = torch.tensor([ids])
        log_p = hf(text).logits[0, start - 1 : -1].float().log_softmax(-1)
        own = text[0, start:]
        greedy += float((log_p.argmax(-1) == own).sum())
        nats += float(log_p.gather(1, own[:, None]).sum())
        tokens, forwards = tokens + len(own), forwards + result.nfe
    return {"tokens_per_forward": tokens / forwards, "greedy": greedy / tokens,
            "nats": nats / tokens, "tokens": tokens}  # fmt: skip


if __name__ == "__main__":
    main()
