"""What the house weighs: lines by room, the protocol of samplers, calls of one step.

    python benchmarks/house.py          # all of it, as text

``lines``   lines of every room of production code, of benchmarks and of tests
``names``   hooks and class facts of samplers (public names of the parts in `samplers/base.py` and
            `samplers/turn.py`), and capabilities
``calls``   calls of the library's own functions in a warm call of `localleap`, `dual` and `nano`,
            and the files that they lie in: preparation, until the scheduler begins; admission;
            a step with its scheduling, without network and statistics; each of these; the result,
            what a row gives back, and closing.  A list comprehension and every value of a
            generator count as calls
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PRODUCTION = ("dllm", "samplers", "cache", "kernels", "eval")
OWN = [ROOT / name for name in PRODUCTION]  # and nothing of an environment that lies beside them
PROMPT = "Reverse this list: Tom, Anna, Ben, Mia, Zoe, Max, Eva"


def lines(folder: Path) -> int:
    return sum(len(f.read_text(encoding="utf-8").splitlines()) for f in folder.rglob("*.py"))


def rooms() -> dict[str, int]:
    """Production lines by room."""
    result = {name: lines(ROOT / name) for name in PRODUCTION[1:]}
    for entry in sorted((ROOT / "dllm").iterdir()):
        if entry.is_dir() and any(entry.rglob("*.py")):
            result[f"dllm/{entry.name}"] = lines(entry)
    root = (ROOT / "dllm").glob("*.py")
    result["dllm"] = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in root)
    return result


def hooks() -> set[str]:
    """Public names of the classes of parts: methods, properties, class facts."""
    parts, result = {"Part"}, set[str]()
    for file in ("base.py", "turn.py"):
        for node in ast.parse((ROOT / "samplers" / file).read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if node.name in parts or bases & parts:
                parts.add(node.name)
                result |= {name for name in _names(node) if not name.startswith("_")}
    return result


def _names(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            yield item.name
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id


def capabilities() -> list[str]:
    tree = ast.parse((ROOT / "dllm/core/capabilities.py").read_text(encoding="utf-8"))
    return [
        target.id
        for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets if isinstance(target, ast.Name)
    ]  # fmt: skip


class Calls:
    """Calls of the library's functions by phase, while ``watched`` runs.  A phase begins with the
    call of one of its functions and ends when that returns."""

    def __init__(self, phases: dict[CodeType, str]) -> None:
        self.phases, self.stack = phases, ["preparation"]
        self.count: Counter[str] = Counter()
        self.files: dict[str, set[str]] = {}
        self.names: dict[str, Counter[str]] = {}
        self.entered: Counter[str] = Counter()

    def watched(self, function: Callable[[], Any]) -> Any:
        gc.collect()  # what others left behind is not closed meanwhile
        gc.disable()
        sys.setprofile(self._event)
        try:
            return function()
        finally:
            sys.setprofile(None)
            gc.enable()

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call":
            if code in self.phases:
                self.stack.append(self.phases[code])
                if self.stack[-1] == "step":  # what is scheduled between steps belongs to them
                    self.stack[0] = "step"
                self.entered[self.stack[-1]] += 1
            file = Path(code.co_filename)
            if any(room in file.parents for room in OWN):
                phase = self.stack[-1]
                self.count[phase] += 1
                self.files.setdefault(phase, set()).add(str(file.relative_to(ROOT)))
                name = f"{file.name}:{code.co_name}"
                self.names.setdefault(phase, Counter())[name] += 1
        elif event == "return" and code in self.phases:
            self.stack.pop()


def calls() -> Calls:
    """A warm call of a loaded model."""
    import dllm
    from dllm.engine.forward import Forward
    from dllm.engine.work import Work
    from dllm.kernels.transfer import ToHost
    from dllm.runtime.scheduler import Scheduler

    model = dllm.load("nano")
    how: dict[str, Any] = {"sampler": "localleap", "cache": "dual", "max_new_tokens": 64}

    def call() -> Any:
        return dllm.generate(model, PROMPT, **how)

    call()
    watch = Calls({
        Scheduler.advance.__code__: "step", Scheduler._admit.__code__: "admission",
        Forward._backbone.__code__: "network", Forward._statistics.__code__: "statistics",
        Scheduler._finish.__code__: "result", Scheduler.close.__code__: "result",
        ToHost.__init__.__code__: "statistics", ToHost.arrays.__code__: "statistics",
        Work._part.__code__: "result",
    })  # fmt: skip
    watch.watched(call)
    return watch


def main() -> None:
    weights = rooms()
    print("\n".join(f"{count:7,} {name}" for name, count in weights.items()))
    print(f"{sum(weights.values()):7,} production lines")
    print(f"{lines(ROOT / 'benchmarks'):7,} benchmarks, {lines(ROOT / 'tests'):,} tests")
    print(f"{len(hooks()):7} hooks and class facts of samplers: {' '.join(sorted(hooks()))}")
    print(f"{len(capabilities()):7} capabilities")
    watch = calls()
    steps = watch.entered["step"]
    for phase, count in watch.count.items():
        per = count / steps if phase in ("step", "network", "statistics") else count
        print(f"{per:7.1f} calls in {len(watch.files[phase])} files: {phase}")
    if "-v" in sys.argv:
        for phase, names in watch.names.items():
            print(phase, *(f"{n} {name}" for name, n in names.most_common()), sep="\n    ")


if __name__ == "__main__":
    main()
