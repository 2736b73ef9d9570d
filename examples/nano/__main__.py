"""Train a bundled model from scratch: ``python -m examples.nano --objective masked``.

A run that was stopped goes on where it saved last.  "masked" makes ``nano``, "causal"
``nano-ar``, "uniform" ``nano-uniform``.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dllm.core.errors import DllmError
from dllm.train.loop import Report

from .recipe import NAMES, NanoTraining, export, train


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.nano", description=__doc__)
    parser.add_argument("--objective", choices=NAMES, default="masked")
    parser.add_argument("--steps", type=int, help="training steps (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--examples", type=int, default=16,
                        help="held-out prompts per task in an evaluation (0: none)")  # fmt: skip
    parser.add_argument("--weights-from", type=Path, help="run whose weights this one starts with")
    parser.add_argument("--log-every", type=int, default=20, help="steps")
    parser.add_argument("-o", "--output", type=Path, help="folder (default: runs/NAME)")
    o = parser.parse_args(arguments)
    if (o.steps is not None and o.steps < 1) or o.log_every < 1 or o.examples < 0:
        parser.error("--steps and --log-every are 1 or more, --examples 0 or more")
    steps = {} if o.steps is None else {"steps": o.steps}
    folder = o.output or Path("runs") / NAMES[o.objective]
    try:
        recipe = NanoTraining.of(o.objective, seed=o.seed, **steps)
        train(
            recipe, folder, device=o.device, compile_model=not o.no_compile,
            accuracy_examples=o.examples, weights_from=o.weights_from,
            report=Report(print, o.log_every),
        )  # fmt: skip
    except (DllmError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "stopped; the same command goes on\n")
    export(folder, folder / NAMES[o.objective])
    print(f"{recipe.steps} steps of the {o.objective} recipe: {folder / NAMES[o.objective]}")


if __name__ == "__main__":
    main()
