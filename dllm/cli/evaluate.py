"""``dllm eval``: tasks of lm-evaluation-harness on a model, a sampler and a cache."""

import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import ConfigError, DllmError, UnknownNameError, missing
from .options import DECODING, OUTPUT, Decoding, option, takes
from .output import check_output, note, versions, waiting

if TYPE_CHECKING:
    from ..eval.harness import Usage

# Options of the help page; --help-all has all.
SHOWN = (
    "tasks model sampler cache num_fewshot limit "
    "chat batch_size max_gen_toks estimator samples quantization output"
).split()
TASK, LIKELIHOOD = "Tasks", "Likelihood"
HARNESS = ("batch_size", "max_gen_toks", "estimator", "samples", "early_stop", "check_greedy")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Decoding):
    """Options of ``dllm eval``."""

    PARAMETERS = Decoding.PARAMETERS - {"max_batch_size"}  # which is its batch_size
    include_path: Path | None = option(None, "Folder of your own task files.", TASK)
    num_fewshot: int | None = option(None, "Few-shot examples (default: the task's).", TASK, min=0)
    limit: int | None = option(None, "Documents per task, default all.", TASK, min=1)
    chat: bool = option(False, "Put prompts into the model's chat template.", TASK)
    system: str | None = option(None, "System prompt, before everything else.", TASK)
    confirm_run_unsafe_code: bool = option(
        False, "Allow tasks to run code that the model wrote.", TASK
    )
    batch_size: int = option(32, "Sequences decoded at a time, default 32.", DECODING, min=1)
    max_gen_toks: int = option(
        256, "Maximum length of an answer where the task sets none, default 256.", DECODING, min=1
    )
    estimator: str | None = option(
        None, "Estimator of likelihoods: stratified (default), llada, dream, ...", LIKELIHOOD
    )
    samples: int = option(128, "Forward passes per likelihood, default 128.", LIKELIHOOD)
    early_stop: bool = option(False, "Stop once a choice is decided.", LIKELIHOOD)
    check_greedy: bool = option(False, "Also check greedy continuations.", LIKELIHOOD)
    output: Path | None = option(None, "Write all results as JSON.", OUTPUT)
    log_samples: bool = option(False, "Add every document and likelihood to the JSON.", OUTPUT)


@takes(Evaluation)
def evaluate(
    tasks: Annotated[str, typer.Option("--tasks", "-t", help="Names, separated by commas.")],
    *,
    options: Evaluation,
) -> None:
    """Run tasks of lm-evaluation-harness.  The table goes to stdout; needs the extra "eval"."""
    if find_spec("lm_eval") is None:
        raise missing("lm-evaluation-harness", "eval")
    if options.output is not None:
        check_output(options.output, "results ")
    with waiting("loading lm-evaluation-harness"):
        import lm_eval
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import handle_non_serializable, make_table

        from ..eval.harness import DLLM

    folder = options.include_path
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} for --include-path")
    manager = TaskManager(include_path=None if folder is None else str(folder))
    names = known_tasks(tasks, manager)
    given = {name: getattr(options, name) for name in HARNESS}
    with waiting(f"loading {options.model}"):
        lm = DLLM(options.model, **options.loading, **options.parts(), **given, **options.how)
    try:
        result = lm_eval.simple_evaluate(
            lm, tasks=names, task_manager=manager, num_fewshot=options.num_fewshot,
            limit=options.limit, apply_chat_template=options.chat, log_samples=options.log_samples,
            system_instruction=options.system, random_seed=options.how.get("seed", 0),
            confirm_run_unsafe_code=options.confirm_run_unsafe_code,
        )  # fmt: skip
    except DllmError:
        raise
    except Exception as error:  # the harness and its loaders raise many types, mostly about tasks
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the tasks {tasks} cannot be run ({what}); --debug says more") from error
    print(make_table(result))
    if "groups" in result:
        print(make_table(result, "groups"))
    note(cost(lm.usage))
    if options.output is not None:
        scoring, usage = asdict(lm.scoring), asdict(lm.usage)
        about: dict[str, Any] = {"how": lm.how, "scoring": scoring, "usage": usage}
        if options.log_samples:
            about["scores"] = [asdict(score) for score in lm.scores]
        record = {**result, "dllm": about | {"model": lm.model.name, "versions": versions()}}
        text = json.dumps(record, default=handle_non_serializable)
        finite = json.loads(text, parse_constant=lambda _: None)  # JSON has no inf and no nan
        text = json.dumps(finite, indent=1, ensure_ascii=False)
        options.output.write_text(text + "\n", encoding="utf-8")


def known_tasks(given: str, manager: Any) -> list[str]:
    """The tasks that ``given`` names; ``*`` is a wildcard as in the harness."""
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names:
        raise ConfigError("there is no task: pass --tasks with names, separated by commas")
    for name in names:
        if not manager.match_tasks([name]):
            raise UnknownNameError("task", name, manager.all_tasks)
    return list(manager.match_tasks(names))


def cost(used: "Usage") -> str:
    """One line: what the answers cost."""
    parts = []
    if used.requests:
        parts.append(
            f"{used.requests} generations: {used.tokens} tokens, {used.nfe} forwards, "
            f"{used.computed} positions computed, {used.seconds:.1f} s"
        )
    if used.likelihoods:
        parts.append(
            f"{used.likelihoods} likelihoods: {used.likelihood_nfe} forwards, "
            f"largest standard error {used.largest_stderr:.3f} nats"
        )
    return " · ".join(parts)
