"""Write docs/fidelity.md: which recorded runs of official code are replayed, and what deviates.

    python benchmarks/fidelity.py [--check]

Everything but the reasons comes from the recorded runs and the tests that replay them.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from dllm.cache import CACHES  # noqa: E402
from dllm.cache import compose as compose_cache  # noqa: E402
from dllm.core.registry import Registry  # noqa: E402
from dllm.drafting import available as drafting_parts  # noqa: E402
from dllm.samplers import SAMPLERS, compose  # noqa: E402

from fidelity_notes import DRAFTING, METHODS, ROUTINES, SERVED, TRAINING  # isort: skip  # noqa: E402
from tests.golden import test_traces  # noqa: E402
from tests.golden.conftest import goldens_dir  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
MODULES = [  # whoever replays cases lists them as CASES, and how as BUILDERS
    importlib.import_module(f"tests.golden.{path.stem}")
    for path in sorted((*GOLDEN.glob("test_*.py"), *GOLDEN.glob("replay*.py")))
]
BUILDERS = {k: b for module in MODULES for k, b in getattr(module, "BUILDERS", {}).items()}

PAGE = ROOT / "docs" / "fidelity.md"
HEAD = """# Fidelity

A bare name is the published method.  Where its authors have published code, that code was run on
tiny random networks, on a CPU in float32 at temperature 0, and recorded: the tokens, what every
forward decided, how many positions it was fed.  The tests replay each case with the sampler and the
cache named here and compare all three (`tests/golden`).  A case counts as *whole* when it is equal
to its end, as *in part* when it is equal up to a defect of the official run, named below.  Forwards
of the official code that reveal nothing have no counterpart.  Of equal scores the leftmost position
comes first, which official code leaves open: a `top_p` that keeps one token makes many.
"""


def cases() -> Iterator[tuple[dict[str, Any], bool]]:
    """Every case that is replayed, and whether to its end."""
    for module in MODULES:
        for p in getattr(module, "CASES", ()):
            case = p if isinstance(p, dict) else p.values[0]
            case["drafting"], whole = getattr(module, "PARTS", None), True
            if module is test_traces:
                whole = "batch" in case or test_traces.sound(case, _steps(case))[1]
            yield case, whole


def _steps(case: dict[str, Any]) -> test_traces.Steps:
    return test_traces._expected(case, 0, 0)


def parts_of(case: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Names of the sampler parts and of the cache that replay a case.  A rule of released code that
    stands beside the traces has the name of the part that it changes, marked as `CHANGED`."""
    sampler, cache, arguments = BUILDERS[case["algorithm"]](case)
    options = {k: v for k, v in arguments.items() if k in ("steps", "block_length")}
    family = case["model"].split("-")[0]
    parts = {
        named(part, SAMPLERS) for part in compose(sampler, options=options, family=family).parts
    }
    return parts - {""}, {named(compose_cache(cache, family), CACHES)}


def named(part: Any, registry: Registry[Any]) -> str:
    """The registered name of a part, or of what it is a subclass of; nothing if it is neither."""
    changed = ""
    for cls in type(part).__mro__:
        if getattr(cls, "name", "") in registry and registry[cls.name] is cls:
            return cls.name + changed
        if cls.__module__.startswith("tests.") and not cls.__name__.startswith("Watched"):
            changed = CHANGED
    return ""


def main() -> int:
    recorded = {path.stem: path for path in sorted((goldens_dir() / "traces").glob("*.json"))}
    stems = {
        case["id"]: stem
        for stem, path in recorded.items()
        for case in json.loads(path.read_text(encoding="utf-8"))["cases"]
    }
    count: dict[str, Counter[str]] = {}
    names: dict[str, set[str]] = {}
    seen: dict[str, Counter[str]] = {"sampler": Counter(), "cache": Counter()}
    for case, whole in cases():
        stem = stems[case["id"]]
        count.setdefault(stem, Counter())["whole" if whole else "part"] += 1
        if case["drafting"]:
            names.setdefault(stem, set()).update(case["drafting"])
            for kind, registry in (("sampler", SAMPLERS), ("cache", CACHES)):
                seen[kind].update(name for name in case["drafting"] if name in registry)
            continue
        parts, cache = parts_of(case)
        names.setdefault(stem, set()).update(parts - BESIDES, cache - {"none"})
        seen["sampler"].update(parts)
        seen["cache"].update(cache)
    tables = [*routines(recorded, count, names), *methods(seen), *drafting()]
    text = "\n".join([HEAD, *tables, END])
    if "--check" in sys.argv:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print("docs/fidelity.md is current" if same else "run: python benchmarks/fidelity.py")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"{sum(c['whole'] + c['part'] for c in count.values())} cases -> {PAGE}")
    return 0


END = "Made by `python benchmarks/fidelity.py`.\n"
CHANGED = "\\*"
BESIDES = {"eos", "prob", "blocks", "whole", "fixed"}  # parts that nearly every composition has


def routines(
    recorded: dict[str, Path], count: dict[str, Counter[str]], names: dict[str, set[str]]
) -> list[str]:  # fmt: skip
    """One row per file of recorded runs."""
    whole, part = (sum(c[kind] for c in count.values()) for kind in ("whole", "part"))
    lines = [
        "## Recorded runs", "",
        f"{whole + part} decoding traces are replayed, {whole} of them whole, {part} in part.",
        f"{CHANGED} marks a part that the tests change, where released code does something else "
        "than its paper (`tests/golden/quirks.py`); the others are those that a user names.",
        "",
        "| recorded | source | replayed by | whole | what deviates, and why |",
        "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for stem, path in recorded.items():
        data = json.loads(path.read_text(encoding="utf-8"))
        source = data["provenance"]
        if "repo" in source:
            at = f"https://github.com/{source['repo']}/tree/{source['commit']}"
            link = f"[{source['repo']}]({at})"
        else:
            files = [f"`{file.rpartition('/')[2]}`" for file in source["file"].split(", ")]
            link = f"{source['package']} {source['version']}: {' '.join(files)}"
        own = count.get(stem, Counter())
        by = " ".join(map(code, sorted(names.get(stem, ())))) or "-"
        seen = own["whole"] + own["part"]
        replayed = f"{own['whole']}/{len(data['cases'])}"
        note = ROUTINES.get(stem, "")
        if (seen < len(data["cases"]) or own["part"]) and not note:
            raise SystemExit(f"{stem}: say in fidelity_notes.py what is not replayed, and why")
        lines.append(f"| `{stem}` | {link} | {by} | {replayed} | {note} |")
    return [*lines, ""]


def code(name: str) -> str:
    """A name as it stands on the page."""
    plain = name.removesuffix(CHANGED)
    return f"`{plain}`{name[len(plain) :]}"


def methods(seen: dict[str, Counter[str]]) -> list[str]:
    """One row per registered part."""
    lines = [
        "## Methods", "",
        "Parts that deviate from published code, with their cases, as they are and as the tests "
        "change them.",
        "", "| name | paper | cases | what deviates, and why |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for kind, registry in (("sampler", SAMPLERS), ("cache", CACHES)):
        for name in sorted(registry):
            cls, note = registry[name], METHODS.get((kind, name), "")
            own, changed = seen[kind][name], seen[kind][name + CHANGED]
            cases = f"{own} + {changed}{CHANGED}" if changed else str(own or "")
            if not cases and not note:
                raise SystemExit(f"{kind} {name}: say in fidelity_notes.py why nothing is replayed")
            link = f"[{cls.arxiv}](https://arxiv.org/abs/{cls.arxiv})" if cls.arxiv else "-"
            shown = f"`{name}`" if kind == "sampler" else f"cache `{name}`"
            if note:
                lines.append(f"| {shown} | {link} | {cases or '-'} | {note} |")
    return [*lines, ""]


def drafting() -> list[str]:
    """One row per registered part of drafting that follows a paper."""
    lines = [
        "## Drafting", "",
        "Recorded is official code of `apd` alone (above), and of block drafters "
        "(`tests/drafting`).  What is exact is held to plain decoding of the verifier, what keeps "
        "a distribution to that distribution, by tests.", "",
        "| role | name | paper | what deviates, and why |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for part in drafting_parts():
        if bool(part.paper) != (part.name in DRAFTING):
            raise SystemExit(f"{part.role} {part.name}: say in fidelity_notes.py what deviates")
        if part.paper:
            link = f"[{part.arxiv}](https://arxiv.org/abs/{part.arxiv})" if part.arxiv else "-"
            lines.append(f"| {part.role} | `{part.name}` | {link} | {DRAFTING[part.name]} |")
    others = (("served", "dllm.drafting.", SERVED), ("training", "dllm ", TRAINING))
    for role, of, notes in others:
        for name, (arxiv, note) in notes.items():
            link = f"[{arxiv}](https://arxiv.org/abs/{arxiv})"
            lines.append(f"| {role} | `{of}{name}` | {link} | {note} |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main())
