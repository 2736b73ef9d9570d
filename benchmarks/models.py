"""docs/models.md, from the registry of families.

python benchmarks/models.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dllm.models import Family, families

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = """# Models

Every checkpoint loads into a class of transformers by its hub id, its folder, or from memory:
`dllm.load("GSAI-ML/LLaDA-8B-Instruct")`.  A family is a file of data (`dllm/models/`): which
architectures it reads, how `config.json` and the names of the weights translate, and the few
facts that decoding needs.  No modelling code, no remote code, safetensors only.

*Made from the registry by `python benchmarks/models.py`.*

**attends**: to the whole text, causally between blocks of that many positions, or causally in an
order in which decided tokens come before masks.  **shift**: 1
when `logits[i]` predict token `i + 1`.  **verified**: what the implementation was held against.
"Official code" was run beside this project, in float32 on a CPU, on a small checkpoint with
random weights; "by configuration" means that the published configuration and description were
followed and that the tests compare with transformers' own network under a mask written out
position by position.  No checkpoint of full size has been run here.

"""
TABLE = (
    "| family | network | mask id | ends | shift | attends | verified |\n"
    "| --- | --- | --- | --- | --- | --- | --- |\n"
)
CHECKPOINTS = "| checkpoint | family | licence | block |\n| --- | --- | --- | --- |\n"
TAIL = """
## Others

**Any causal language model of transformers** loads as a verifier of drafts (`dllm.speculate`); it
does not decode by diffusion.  WeDLM's models do both: a decided token predicts the next one, so
that they verify drafts, their own among them, and `dllm.score` asks them by the chain rule.

**A checkpoint under another name** can be tried by saying which family it follows and what it
does not say itself:

```
dllm.load("someone/my-diffusion-qwen", family="a2d_qwen3", mask_token_id=151669)
dllm.load("someone/my-block-diffusion", family="a2d_qwen3", mask_token_id=151669, block_length=8)
dllm.load("someone/my-dream", family="dream", mask_token_id=151666, logit_shift=1)
```

`family=` accepts plain Llama, Qwen2 or Qwen3 weights and weights in the official layout of the
family under another architecture name.  Every weight must have a place and every shape must
agree, so a wrong guess is an error; what cannot be noticed is a wrong mask id or shift: such a
model answers nonsense.  What a family states is in `dllm.models.Family`;
`dllm.models.register_family` adds one.

**DiffusionGemma** (`google/diffusiongemma-26B-A4B-it`, in transformers) is no masked diffusion
model: its noise is drawn uniformly from the vocabulary, so every position always holds some
token, and nothing says which ones are undecided.  Samplers and caches here work on masks; it ends
at a sentence that says so.  Decode it with transformers' own `generate`.  The same holds for SEDD
with uniform noise.  MDLM, BD3LM and SEDD of their authors are diffusion transformers with
adaptive norms, which no class of transformers is; they are not read.

## Precision

`dtype="auto"` (the default) is, on a GPU, what the checkpoint stores.  On a CPU it is bfloat16
where the processor says that it multiplies such numbers itself (`amx_bf16` or `avx512_bf16` among
its flags), else float32 if that fits into memory.  What differs from the files is logged when the
model is loaded.  Networks of less than 50 million parameters stay as stored, and the bundled models
are float32: what was recorded of them stays comparable.

<!-- dtypes:begin -->
<!-- dtypes:end -->

Accuracy of `nano` in both, 40 held-out prompts of each of its 16 tasks, the same prompts, sampler
`threshold`:

| | float32 | bfloat16 |
| --- | --- | --- |
| right of 640 | 515 | 517 |
| right in this one only | 1 | 3 |
| equal answers | 603 | 603 |

Exact McNemar test: p = 0.63, so no loss is shown; 33 of the 37 answers that differ are of `shuffle`
and `latin`, which `nano` cannot do.

### Weights on a CPU

On x86 processors with AVX-512, linear layers are multiplied by oneDNN, with a copy of each weight
in the order it wants; [Kernels](kernels.md#linear-layers-on-a-cpu) has the reason and the gain.
The copy is made at the first forward without gradients and takes as much memory as the weights
(those that were mapped from a file can be dropped by the system).  Where that is more than half
of what is free when the model is loaded there is no copy: the same numbers, fewer per second.
`state_dict`, training and adapters see the network as transformers built it.

## Quantised weights

`quantization_config=` goes to transformers: bitsandbytes, torchao and others replace linear
layers when the weights are loaded; the head stays as it is.  Folders with a `quantization_config`
in `config.json` load as they are.  A GGUF file is read by transformers
(`AutoModelForCausalLM.from_pretrained(folder, gguf_file=...)`, which widens its numbers), and the
network in memory handed to `dllm.load(network, family=..., mask_token_id=...)`.  `dllm doctor -m
MODEL` says what fits into memory at which width.

Tested on a CPU: torchao's int8 weights (`nano` answers as before, with and without a cache) and a
GGUF file in blocks of 8 bits.  bitsandbytes was not run here.
"""


MEASURED = re.compile(r"<!-- dtypes:begin -->\n(.*?)<!-- dtypes:end -->", re.DOTALL)


def page() -> str:
    """The whole page.  The table that `benchmarks/tables.py` writes into it stays."""
    known = [family for family in families().values() if family.diffusion]
    rows = "".join(_row(family) for family in known)
    listed = "".join(
        f"| [`{c.name}`](https://huggingface.co/{c.name}) | `{family.name}` | "
        f"{c.licence or 'see its card'} | {c.block_length or ''} |\n"
        for family in known
        for c in family.checkpoints
    )
    notes = "".join(f"- `{f.name}`: {f.note}\n" for f in known if f.note)
    written = MEASURED.search(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else None
    tail = TAIL if written is None else MEASURED.sub(lambda _: written[0], TAIL)
    return (
        f"{HEAD}{TABLE}{rows}\n{notes}\n## Checkpoints\n\n"
        f"*block*: where only the name says it.\n\n{CHECKPOINTS}{listed}{tail}"
    )


def _row(family: Family) -> str:
    network = family.model_class.__name__ if family.model_class else ""
    facts = [release.facts for release in family.releases.values()]
    mask = ", ".join(str(f["mask_token_id"]) for f in facts if "mask_token_id" in f)
    ends = [str(f["eos_token_id"]) for f in facts if "eos_token_id" in f]
    ends += [f"`{family.end_of_turn}`".replace("|", "\\|")] if family.end_of_turn else []
    return (
        f"| `{family.name}` | {network.removesuffix('ForCausalLM')} | "
        f"{mask or 'from its files'} | {', '.join(ends) or 'from its files'} | "
        f"{family.logit_shift} | {_attends(family)} | {family.verified} |\n"
    )


def _attends(family: Family) -> str:
    if family.mask_kind == "block_causal":
        return f"blocks of {family.block_length or f'`{family.block_field}`'}"
    if family.mask_kind == "decided_first":
        return "decided tokens first"
    return "whole text, or `block_length=`" if family.any_blocks else "whole text"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/models.md is not what the registry says: run python benchmarks/models.py")
