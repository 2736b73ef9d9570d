"""docs/reference/models.md, from the registry of families.

python benchmarks/models.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from dllm.models import Family, families

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"
HEAD = """# Models

dllm loads a checkpoint by hub id, by folder, or from memory, into transformers' own class:
`dllm.load("GSAI-ML/LLaDA-8B-Instruct")`.  It reads safetensors and never runs remote code.
`dllm doctor -m ID` says whether it fits your machine ([Hardware](../hardware.md)).

## Families

- **attends**: to the full text; block-causal with blocks of that size; or unmasked tokens first.
- **shift**: 1 where `logits[i]` predict token `i + 1`.
- **verified**: against official code (on small random checkpoints), or by configuration (against
  transformers' network under an explicit mask).

We ran no checkpoint of full size.

"""
TABLE = (
    "| family | network | mask id | ends | shift | attends | verified |\n"
    "| --- | --- | --- | --- | --- | --- | --- |\n"
)
CHECKPOINTS = "| checkpoint | family | licence | block |\n| --- | --- | --- | --- |\n"
BY_HAND = "\n## Others\n"  # the page from here on is written by hand


def page() -> str:
    """The whole page: its tables of families and checkpoints made anew, the rest as it is."""
    known = [family for family in families().values() if family.diffusion]
    rows = "".join(_row(family) for family in known)
    listed = "".join(
        f"| [`{c.name}`](https://huggingface.co/{c.name}) | `{family.name}` | "
        f"{c.licence or 'see its card'} | {c.block_length or ''} |\n"
        for family in known
        for c in family.checkpoints
    )
    notes = "".join(f"- `{f.name}`: {f.note}\n" for f in known if f.note)
    text = PAGE.read_text(encoding="utf-8")
    tail = text[text.index(BY_HAND) :]
    return (
        f"{HEAD}{TABLE}{rows}\n{notes}\n## Checkpoints\n\n"
        f"*block*: where only the name says it.\n\n{CHECKPOINTS}{listed}{tail}"
    )


def _row(family: Family) -> str:
    network = family.model_class.__name__ if family.model_class else ""
    facts = [*{id(release): release.facts for release in family.releases.values()}.values()]
    mask = (
        "uniform noise"
        if family.uniform
        else ", ".join(str(f["mask_token_id"]) for f in facts if "mask_token_id" in f)
    )
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
    if family.mask_kind == "causal_prefix":
        return f"blocks of `{family.block_field}` from the prompt's end, causal before"
    if family.mask_kind == "decided_first":
        return "decided tokens first"
    return "whole text, or `block_length=`" if family.any_blocks else "whole text"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/reference/models.md is stale: run python benchmarks/models.py")
