"""Small changes of the code, each judged by the tests of ``.ci/run`` that call what was changed.

    python benchmarks/mutants.py [COUNT] [--seed N] [--only PATH] [--jobs N] [--map FILE]

Prints the changes that no test notices.  A change is one of: a comparison turned or made (not)
strict, a number plus or minus one, a sign, a ``not``, an operand left out or swapped, ``and`` for
``or``.  Which tests call which function is learnt in a first run and kept beside FILE
(``build/mutants.*``), a file for each folder of tests, as is what was killed: a run that was
stopped goes on.  Delete what no longer holds.  Every run is a fork of a process that has imported
the code, with a function exchanged; a mutant has 40 seconds of processor time of the default tests
and 40 of the slow ones, the cheapest and most special tests first.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import gc
import importlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
CODE = (
    "samplers", "cache", "dllm/drafting/accept", "dllm/drafting/drafters", "dllm/drafting/length",
    "dllm/drafting/search", "dllm/train/objectives",
    *(f"dllm/engine/{name}.py" for name in (
        "extents", "loop", "prefixes", "recipe", "rows", "turn", "visibility", "work",
    )),
)  # fmt: skip
TESTS = (
    "golden", "engine", "drafting", "cache", "train", "samplers", "structured", "likelihood",
    "fuzz", "test_holes.py", "test_initial_text.py", "test_session.py", "test_uniform_noise.py",
)  # fmt: skip
SECONDS = 40
QUIET = ("-q", "-p", "no:cacheprovider", "-p", "xdist.plugin", "--assert=plain")
LONGEST = "tests/engine/test_lossless.py::test_freedave_is_lossless_on_500_prompts"
CHOSEN: dict[str, tuple[str, ...]] = {  # which tests a run of pytest takes
    "default": (), "slow": ("-m", "slow and not gpu", "--deselect", LONGEST),
}  # fmt: skip
TURNED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
EQUIVALENT = {  # what changes no result: path, function, expression
    ("dllm/engine/visibility.py", "tensor", "True"): "a copy to a GPU may overlap",
    ("dllm/engine/visibility.py", "upload", "True"): "a copy to a GPU may overlap",
    ("dllm/engine/loop.py", "Engine._options", "len(self._checked) > 1024"): "when to forget",
    ("dllm/engine/loop.py", "Engine._options", "1024"): "when to forget",
    ("dllm/drafting/search/marginals.py", "Marginals._columns", "2 * flat.size > length"): "cost",
    ("dllm/drafting/search/marginals.py", "Marginals.from_logits",
     "x.shape[1] < vocab_size"): "no columns are added where none is missing",
    ("dllm/drafting/search/marginals.py", "_top", "len(row) % width"): "cost",
    ("dllm/drafting/search/marginals.py", "Marginals._columns", "mass - 1e-06"): "cost",
    ("cache/dkv.py", "neighbours", "free > middle"): "a middle is never free",
    ("cache/dpad.py", "DPadCache.kept", "near - canvas.window[1]"): "a distance that is squared",
    ("dllm/drafting/accept/rows.py", "Rows.coupled", "4"): "cost",
    ("dllm/drafting/accept/rows.py", "Rows.coupled", "4 * len(alive) < len(row)"): "cost",
    ("dllm/engine/turn.py", "_keep", "width > 1"): "nothing is copied to nobody",
    ("dllm/engine/recipe.py", "RowOptions.of", "0"): "how much is looked at that nobody reads",
    ("dllm/engine/recipe.py", "_bans", "{*sampler.conditional, *(sampler.stop_ids if "
     "config.min_new_tokens else ())} - always"): "what is banned twice is banned",
    ("dllm/engine/turn.py", "jobs_of", "0"): "of jobs that stand there is one",
    ("dllm/engine/visibility.py", "Visibility._runs",
     "ranks[causal:] - self.origin"): "the ranks of a block are equal",
    ("dllm/engine/visibility.py", "Visibility.bound", "0"): "blocks count from any border",
    ("dllm/engine/loop.py", "Engine.close", "0"): "no text that is kept is as short",
    ("samplers/dreamon.py", "_holes", "0"): "an answer never has as few positions",
    ("dllm/engine/work.py", "Work._chunks", "len(rows) > 1"): "one row is in order",
    ("dllm/engine/rows.py", "Row.order", "0"): "rows without slots are in any order",
    ("dllm/drafting/drafters/history.py", "History._places", "1"): "how many are looked at",
    ("dllm/drafting/drafters/history.py", "History.forget", "self.size // 2"): "when to forget",
    ("dllm/drafting/drafters/history.py", "History.forget", "2"): "when to forget",
    ("dllm/drafting/drafters/history.py", "History.forget", "4096"): "when to forget",
}  # fmt: skip
Change = Callable[[Any], ast.AST]


def changes(node: ast.AST) -> Iterator[Change]:
    """What may be done to an expression, as functions of a copy of it."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in TURNED:
            yield lambda n: ast.Compare(n.left, [TURNED[type(op)]()], n.comparators)
        case ast.BoolOp(op=op):
            yield lambda n: ast.BoolOp(TURNED[type(op)](), n.values)
            yield lambda n: n.values[0] if len(n.values) == 2 else ast.BoolOp(n.op, n.values[:-1])
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield lambda n: n.operand
        case ast.BinOp(op=op):
            yield lambda n: n.left
            if type(op) in TURNED:
                yield lambda n: ast.BinOp(n.left, TURNED[type(op)](), n.right)
            if isinstance(op, ast.Sub | ast.Div | ast.FloorDiv):
                yield lambda n: ast.BinOp(n.right, n.op, n.left)
        case ast.Constant(value=bool(value)):
            yield lambda n: ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield lambda n: ast.Constant(value + 1)
            yield lambda n: ast.Constant(value - 1)


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with their qualified names; those inside of others belong to these."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield within + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{within}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from functions(node, within)


def mutable(tree: ast.AST) -> Iterator[tuple[int, str, ast.AST]]:
    """Expressions in the bodies of functions: index in the walk, name of the function, node.
    Messages, checks of what a user gives, and annotations are left out."""
    index = {id(node): i for i, node in enumerate(ast.walk(tree))}
    for name, function in functions(tree):
        if function.name in ("check", "__post_init__"):
            continue
        todo: list[ast.AST] = list(function.body)
        while todo:
            node = todo.pop()
            if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
                continue
            if isinstance(node, ast.keyword) and node.arg == "strict":  # a check, too
                continue
            if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
                todo += node.orelse
                continue
            if isinstance(node, ast.Subscript) and ast.unparse(node).endswith(".nonzero()[0]"):
                node = node.value  # an array of one axis has one list of places
            yield index[id(node)], name, node
            children = (
                child for field, child in ast.iter_fields(node)
                if field not in ("annotation", "returns", "args", "decorator_list")
                or isinstance(node, ast.Call)
            )  # fmt: skip
            for child in children:
                items = child if isinstance(child, list) else [child]
                todo += [item for item in items if isinstance(item, ast.AST)]


class Mutant:
    def __init__(self, path: Path, at: int, function: str, node: Any, change: Change) -> None:
        self.path, self.at, self.function, self.change = path, at, function, change
        new = ast.unparse(ast.fix_missing_locations(change(copy.deepcopy(node))))
        self.name = f"{path.relative_to(ROOT)}:{node.lineno}  {ast.unparse(node)}  ->  {new}"

    def code(self) -> Any:
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        chosen = list(ast.walk(tree))[self.at]
        for parent in ast.walk(tree):
            for name, child in ast.iter_fields(parent):
                if child is chosen:
                    setattr(parent, name, self.change(child))
                elif isinstance(child, list) and any(c is chosen for c in child):
                    child[[c is chosen for c in child].index(True)] = self.change(chosen)
        return compile(ast.fix_missing_locations(tree), str(self.path), "exec")


def files() -> list[Path]:
    found = [[ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py"))
             for name in CODE]  # fmt: skip
    return [path for several in found for path in several]


def mutants(only: str) -> list[Mutant]:
    return [
        Mutant(path, at, function, node, change)
        for path in files() if only in str(path.relative_to(ROOT))
        for at, function, node in mutable(ast.parse(path.read_text(encoding="utf-8")))
        if (str(path.relative_to(ROOT)), function, ast.unparse(node)) not in EQUIVALENT
        for change in changes(node)
    ]  # fmt: skip


Site = tuple[str, str, int]  # file, qualified name, first line


def exchange(codes: dict[Site, CodeType]) -> None:
    """Give functions of the imported modules other code."""
    for function in gc.get_objects():
        if isinstance(function, FunctionType):
            old = function.__code__
            new = codes.get(of(old), old)
            if new.co_freevars == old.co_freevars:
                function.__code__ = new


def of(code: CodeType) -> Site:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def nested(code: CodeType) -> Iterator[CodeType]:
    """``code``, and what is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


class Calls:
    """Which functions every test calls, and the processor time that it takes."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = defaultdict(set)
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()
        self.now: set[str] = set()

    def watch(self) -> None:
        """Every function first says that it is called, which costs less than a tracer."""
        builtins.__called__ = lambda name: self.now.add(name)  # type: ignore[attr-defined]
        codes = {}
        for path in files():
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for name, function in functions(tree):
                key = f"{path.relative_to(ROOT)}:{name}"
                function.body[:0] = ast.parse(f"__called__({key!r})").body
            for code in nested(compile(tree, str(path), "exec")):
                if "__called__" in code.co_names:
                    codes[of(code)] = code
        exchange(codes)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start, self.now = time.process_time(), set()
        yield
        test = item.nodeid.split("[")[0]  # cases of one test may share what they compute
        self.seconds[test] += time.process_time() - start
        self.found[test] |= self.now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:  # what fails without a change judges none
            self.failed.add(report.nodeid.split("[")[0])


def fork(run: Callable[[], int]) -> int:
    """The exit code of ``run`` in a process of its own, without its output; 99 for a signal,
    98 for an exception."""
    child = os.fork()
    if not child:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        try:
            code = run()
        except BaseException:
            code = 98
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 99


def thinned() -> list[str]:
    """Where ``.ci/run`` runs slow tests, too."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    listed = re.search(r"^thinned=\(.*?^\)", script, re.M | re.S)
    assert listed, "the list of .ci/run has another form"
    shell = listed[0] + '\nprintf "%s\\n" "${thinned[@]}"'
    return subprocess.run(["bash", "-c", shell], capture_output=True, text=True).stdout.split()


def learn(file: Path, jobs: int) -> list[dict[str, Any]]:
    """Tests by function, cheapest first, of default tests and of slow ones; learnt where no file
    beside ``file`` holds them yet.  What was learnt of tests that are gone is left out."""

    def run(part: tuple[str, str]) -> dict[str, Any]:
        speed, tests = part
        path = file.with_suffix(f".{speed}-{re.sub('[^a-z_]', '-', tests)}")

        def watched() -> int:
            calls = Calls()
            calls.watch()
            done = pytest.main([*QUIET, *CHOSEN[speed], f"tests/{tests}"], [calls])
            if pytest.ExitCode.TESTS_FAILED < done < pytest.ExitCode.NO_TESTS_COLLECTED:
                return int(done)
            found = {t: sorted(f) for t, f in calls.found.items() if t not in calls.failed}
            path.write_text(json.dumps({"found": found, "seconds": calls.seconds}))
            return 0

        if not path.exists() and fork(watched):
            raise SystemExit(f"tests/{tests} did not run")
        return json.loads(path.read_text())

    file.parent.mkdir(exist_ok=True)
    slow = [tests for tests in thinned() if tests.startswith(TESTS)]
    learnt = []
    with ThreadPool(jobs) as pool:
        for speed, parts in (("default", TESTS), ("slow", slow)):
            learnt.append(joined(pool.map(run, [(speed, part) for part in parts], 1)))
    return learnt


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the parts of ``learn`` hold, the other way round: tests by function."""
    seconds = {test: s for part in parts for test, s in part["seconds"].items()}
    tests: dict[str, list[str]] = defaultdict(list)
    for test, called in ((t, f) for part in parts for t, f in part["found"].items()):
        path, *_, name = test.split("::")
        if (ROOT / path).exists() and f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"):
            for function in called:
                tests[function].append(test)
    width = Counter(test for calling in tests.values() for test in calling)
    for calling in tests.values():  # cheap ones, and those of few functions, first
        calling.sort(key=lambda test: seconds[test] * width[test])
    return {"tests": tests, "seconds": seconds}


def load() -> None:
    """Import what forks then need not: the code, and networks of the tests."""
    torch.set_num_threads(1)
    for path in files():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        importlib.import_module(name if name.startswith("dllm") else f"dllm.{name}")
    import transformers

    assert transformers.LlamaForCausalLM and transformers.Qwen3ForCausalLM


def judge(mutant: Mutant, learnt: list[dict[str, Any]]) -> str:
    """What becomes of a mutant."""
    key, fate = f"{mutant.path.relative_to(ROOT)}:{mutant.function}", "not called"
    for choice, known in zip(CHOSEN.values(), learnt, strict=True):
        tests, total = [], 0.0
        for test in known["tests"].get(key, ()):
            total += known["seconds"][test]
            if not tests or total < SECONDS:
                tests.append(test)

        def run(tests: list[str] = tests, choice: tuple[str, ...] = choice) -> int:
            exchange({of(code): code for code in nested(mutant.code())})
            gc.freeze()  # pytest collects at its end, and need not look at what was imported
            resource.setrlimit(resource.RLIMIT_CPU, (3 * SECONDS, 3 * SECONDS))
            return int(pytest.main([*QUIET, *choice, "-x", *tests]))

        if tests:
            fate = {0: "survived", 1: "killed", 99: "killed"}.get(fork(run), "not judged")
        if fate not in ("survived", "not called"):
            break
    return fate


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", nargs="?", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the paths that are changed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--map", type=Path, default=ROOT / "build" / "mutants")
    given = parser.parse_args()
    os.chdir(ROOT)
    os.environ |= {
        "TRITON_INTERPRET": "1", "DLLM_KERNELS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
    }  # fmt: skip
    load()
    learnt = learn(given.map, given.jobs)
    everything = mutants(given.only)
    chosen = random.Random(given.seed).sample(everything, min(given.count, len(everything)))
    killed, fates = given.map.with_suffix(".killed"), Counter[str]()
    known = set(killed.read_text().splitlines()) if killed.exists() else set()

    def fate_of(mutant: Mutant) -> tuple[Mutant, str]:
        return mutant, "killed" if f"{mutant.at} {mutant.name}" in known else judge(mutant, learnt)

    with ThreadPool(given.jobs) as pool, killed.open("a") as file:
        for mutant, fate in pool.imap_unordered(fate_of, chosen):
            fates[fate] += 1
            if fate != "killed":
                print(f"{fate}: {mutant.name}", flush=True)
            else:
                print(mutant.at, mutant.name, file=file, flush=True)
    print(f"{len(chosen)} of {len(everything)} changes:", dict(fates))
    return fates.total() - fates["killed"] > 0.05 * len(chosen)


if __name__ == "__main__":
    sys.exit(main())
