"""A tokenizer and its chat template are programs: they are tried in a process with little time and
memory before a server depends on them.

What the trial finds is what happens to its sample.  Templates that wait for a certain message pass.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers

from ..core.child import command, limit
from ..core.errors import CheckpointError
from .tokenizer import FILES, HERE

SECONDS = 60  # of processor time
MEMORY = 4 << 30  # bytes
GROWTH = 64  # characters or tokens per character of the sample
TEMPLATES = "chat_template.jinja", "tokenizer_config.json"
READS, ENCODES, RENDERS = "reads", "encodes", "renders"
SAMPLE = 40 * ("".join(map(chr, range(32, 127))) + "\näß漢字 один 😀 ")
TURNS = [{"role": role, "content": f"{role} 1\n2"} for role in ("user", "assistant", "user")]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {
    "type": "object", "properties": {"x": {"type": "string"}}}}}  # fmt: skip


def probe(folder: Path, loader: str = "AutoTokenizer", seconds: int = SECONDS) -> None:
    """Try the tokenizer and the chat template in ``folder``, read by a class of transformers, in a
    process that may take ``seconds`` of processor time and `MEMORY`.

    Raises `CheckpointError` where they take more, or make very long texts of short ones.  Files
    that cannot be read pass: loading them says why.
    """
    files = [name for name in FILES if (folder / name).exists()]
    if not files:
        return
    try:
        # A limit for systems that know none of processor time, and for machines that are busy.
        done = subprocess.run(
            command(__name__, "main", str(folder), loader, str(seconds)), capture_output=True,
            text=True, timeout=20 * seconds, check=False,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        said, told, ended = done.stdout, done.stderr.strip(), done.returncode
    except subprocess.TimeoutExpired as error:
        said, told, ended = (error.stdout or b"").decode(), "it takes too long", -1
    if not said:
        raise CheckpointError(f"the process that tries tokenizers does not start: {told[-300:]}")
    stage, _, more = said.splitlines()[-1].partition(" ")
    if ended == 0 and not more:
        return
    if stage == RENDERS:
        files = [name for name in TEMPLATES if (folder / name).exists()]
    more = more or f"ended, or took more than {seconds} s of processor time or {MEMORY >> 30} GB"
    raise CheckpointError(
        f"{folder / files[0]} is refused: a process that {stage} a short sample with it {more}; "
        "use the files of the original checkpoint"
    )


def main() -> None:
    """What the process does: it prints the name of each trial as it begins, then what is wrong."""
    folder, loader, seconds = sys.argv[1:]
    kind: Any = getattr(transformers, loader)
    limit(int(seconds), MEMORY)
    print(READS, flush=True)
    try:
        tokenizer = kind.from_pretrained(Path(folder), **HERE)
    except MemoryError:
        raise
    except Exception:
        return
    print(ENCODES, flush=True)
    with suppress(ValueError, TypeError, KeyError):  # it says so to each text
        ids = tokenizer.encode(SAMPLE)
        _limited(ENCODES, len(SAMPLE), len(ids))
        _limited(ENCODES, len(SAMPLE), len(tokenizer.decode(ids)))
    for system in ([], [SYSTEM]):
        for tools in (None, [TOOL]):
            print(RENDERS, flush=True)
            try:
                text = tokenizer.apply_chat_template(
                    system + TURNS, tools, tokenize=False, add_generation_prompt=True
                )
            except MemoryError:
                raise
            except Exception:  # there is none, or it refuses such messages
                continue
            _limited(RENDERS, 1000, len(text))


def _limited(stage: str, given: int, made: int) -> None:
    if made > GROWTH * given:
        print(f"{stage} made {made:,} characters or tokens of {given:,}", flush=True)
        raise SystemExit
