"""docs/reference/models.md, from the registry of families.

python benchmarks/models.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from dllm.models import Family, families

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"
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
        sys.exit("docs/reference/models.md is stale: run python benchmarks/models.py")
