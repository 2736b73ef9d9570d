"""lm-evaluation-harness on local tasks: what it asks for, what it gets."""

import functools
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dllm
from tests.cli.conftest import Run

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    from dllm.eval.harness import DLLM

LISTS = [
    ["Tom", "Anna", "Ben"],
    ["Ben", "Mia", "Zoe"],
    ["Kate", "Paul", "Gina", "Leo", "Ian"],
    ["Rosa", "Kai", "Uma"],
]
GENERATE = """
task: my_reverse
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 32, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOOSE = """
task: my_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ROLL = """
task: my_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    docs = []
    for items in LISTS:
        answer = ", ".join(items[::-1])
        choices = [answer, ", ".join(items), ", ".join(items[1:] + items[:1] + ["Leo"])]
        question = f"Reverse this list: {', '.join(items)}"
        docs.append({"question": question, "answer": answer, "choices": choices})
    file = folder / "docs.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, text in (("generate", GENERATE), ("choose", CHOOSE), ("roll", ROLL)):
        (folder / f"{name}.yaml").write_text(text.format(file=file))
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    return folder


def run(tasks: Path, names: list[str], **how: Any) -> Any:
    lm = how.pop("lm", None) or DLLM("nano", **how.pop("model", {}))
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    arguments = {"tasks": names, "task_manager": manager, "apply_chat_template": True}
    return lm, lm_eval.simple_evaluate(lm, **(arguments | how))


def test_a_generative_and_a_choice_task(tasks: Path) -> None:
    names = ["my_reverse", "my_choice"]
    lm, result = run(tasks, names, model={"sampler": "threshold(0.9)", "cache": "prefix",
                                       "samples": 32})  # fmt: skip
    assert result["results"]["my_reverse"]["exact_match,none"] == 1.0
    assert result["results"]["my_choice"]["acc,none"] == 1.0
    assert (lm.usage.requests, lm.usage.likelihoods) == (4, 12)
    assert 0 < lm.usage.nfe < lm.usage.tokens
    assert len(lm.scores) == 12 and lm.usage.largest_stderr > 0


def test_early_stop_costs_fewer_forwards(tasks: Path) -> None:
    costs = {}
    for early in (False, True):
        lm, result = run(tasks, ["my_choice"], model={"early_stop": early, "samples": 64})
        assert result["results"]["my_choice"]["acc,none"] == 1.0
        costs[early] = lm.usage.likelihood_nfe
    assert costs[True] < 0.7 * costs[False]


def test_by_registered_name_with_a_system_prompt(tasks: Path) -> None:
    result = lm_eval.simple_evaluate(
        "dllm", "pretrained=nano,sampler=llada,batch_size=2", tasks=["my_reverse"], limit=2,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        apply_chat_template=True, system_instruction="Answer.", num_fewshot=0,
    )  # fmt: skip
    prompt = result["samples"]["my_reverse"][0]["arguments"][0][0]
    assert prompt.startswith("<|system|>Answer.<|user|>Reverse") and prompt.endswith(
        "<|assistant|>"
    )


def test_rolling_likelihood_covers_every_token_once(tasks: Path) -> None:
    lm, result = run(tasks, ["my_text"], apply_chat_template=False)
    perplexity = result["results"]["my_text"]["word_perplexity,none"]
    assert math.isfinite(perplexity) and perplexity > 1
    texts = [", ".join(items[::-1]) for items in LISTS]
    assert sum(s.tokens for s in lm.scores) == sum(len(lm.tok_encode(t)) for t in texts)


def test_long_texts_are_scored_in_windows(tiny: dllm.DiffusionModel) -> None:
    lm = DLLM(tiny, samples=4)
    text = "Tom Anna Ben " * 100
    request = Instance("loglikelihood_rolling", {}, (text,), 0, ("t", 0, 1))
    (total,) = lm.loglikelihood_rolling([request], disable_tqdm=True)
    (score,) = lm.scores  # of the text, not of its windows
    assert total == score.logprob and (score.task, score.doc_id) == ("t", 0)
    assert score.tokens == len(lm.tok_encode(text)) > tiny.facts.context_length
    assert score.stderr == lm.usage.largest_stderr > 0 and lm.usage.likelihoods == 1
    assert lm.usage.shortened == 0  # each window has a token before it
    nothing = Instance("loglikelihood_rolling", {}, ("",), 0, ("t", 1, 1))
    assert lm.loglikelihood_rolling([nothing], disable_tqdm=True) == [0]


def test_a_causal_network_has_the_likelihoods_that_the_harness_finds(
    tiny: dllm.DiffusionModel,
) -> None:
    """Of texts that fill the context, too: the last token is no input."""
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(
        vocab_size=tiny.facts.vocab_size, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=24,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )).eval()  # fmt: skip
    ours = DLLM(dllm.load(hf, tokenizer=tiny.tokenizer))
    theirs = HFLM(hf, tokenizer=tiny.tokenizer, prefix_token_id=ours.prefix_token_id)
    for count in (1, 2, *range(20, 28), 47, 48, 49, 50, 100):
        text = "7" * count
        assert len(ours.tok_encode(text, False)) == count
        roll = Instance("loglikelihood_rolling", {}, (text,), 0, ("t", 0, 1))
        (expected,) = theirs.loglikelihood_rolling([roll], disable_tqdm=True)
        assert ours.loglikelihood_rolling([roll], True) == [pytest.approx(expected, abs=1e-4)]
        pair = Instance("loglikelihood", {}, ("Ben" + text, " Mia"), 0, ("t", 0, 1))
        ((expected, greedy),) = theirs.loglikelihood([pair], disable_tqdm=True)
        assert ours.loglikelihood([pair], True) == [(pytest.approx(expected, abs=1e-4), greedy)]


def instance(text: str, **settings: Any) -> Instance:
    return Instance("generate_until", {}, (text, settings), 0, ("t", 0, 1))


def test_until_and_length_are_honoured(tiny: dllm.DiffusionModel) -> None:
    lm = DLLM(tiny, block_length=8)
    (free,) = lm.generate_until([instance("Tom", until=[], max_gen_toks=16)], disable_tqdm=True)
    assert lm.usage.tokens <= 16 and len(free) > 4
    stop = free[2:4]
    requests = [
        instance("Tom", until=[stop], max_gen_toks=16),
        instance("Anna", until=[], max_gen_toks=4),
    ]
    before = lm.usage.tokens
    cut, _ = lm.generate_until(requests, disable_tqdm=True)
    assert cut == free[: free.index(stop)]
    assert 4 < lm.usage.tokens - before < 16 + 4


def test_an_answer_shorter_than_a_block_is_one_block(tiny: dllm.DiffusionModel) -> None:
    asked = instance("Tom", until=[], max_gen_toks=4)
    (cut,) = DLLM(tiny, block_length=64).generate_until([asked], disable_tqdm=True)
    assert [cut] == DLLM(tiny, block_length=4).generate_until([asked], disable_tqdm=True)


def test_prompts_beyond_the_context_lose_their_beginning(tiny: dllm.DiffusionModel) -> None:
    lm = DLLM(tiny)
    long = instance("Tom, Anna " * 200, until=[], max_gen_toks=100)
    lm.generate_until([long], disable_tqdm=True)
    assert lm.usage.shortened == 1 and lm.usage.requests == 1


def test_a_canvas_does_not_depend_on_the_batch(tiny: dllm.DiffusionModel) -> None:
    """The long prompt leaves room for half a context, the short ones for all they want."""
    asked = [instance(text, until=[], max_gen_toks=100) for text in ("Tom", "Tom, Anna " * 200)]
    result, cost = {}, {}
    for size in (1, 2):
        lm = DLLM(tiny, batch_size=size, sampler="llada(steps=100)")
        result[size] = lm.generate_until(asked, disable_tqdm=True)
        cost[size] = (lm.usage.nfe, lm.usage.shortened)
    assert result[1] == result[2] and cost[1] == cost[2] and cost[1][1] == 1


def test_repeated_requests_are_different_draws(tiny: dllm.DiffusionModel) -> None:
    how = {"until": [], "max_gen_toks": 16, "do_sample": True, "temperature": 1.5}
    result = {
        size: DLLM(tiny, batch_size=size).generate_until([instance("Tom", **how)] * 6, True)
        for size in (2, 6)
    }
    assert result[2] == result[6] and len(set(result[2])) == 6


def test_an_empty_context_is_the_token_that_texts_begin_with(tiny: dllm.DiffusionModel) -> None:
    lm = DLLM(tiny)
    (answer,) = lm.generate_until([instance("", until=[], max_gen_toks=8)], True)
    how = {"sampler": "threshold", "max_new_tokens": 8, "chat": False}
    assert answer == dllm.generate(tiny, np.array([lm.prefix_token_id]), **how).text


def test_sampling_only_where_the_task_asks(tiny: dllm.DiffusionModel) -> None:
    lm = DLLM(tiny)
    assert "temperature" not in lm._settings({"do_sample": False, "temperature": 0.7})
    assert lm._settings({"do_sample": True, "temperature": 0.7})["temperature"] == 0.7
    assert lm._settings({"until": "x"})["stop_strings"] == ("x",)
    asked = DLLM(tiny, temperature=0.2)._settings({"temperature": 0.7, "top_p": 0.5})
    assert "temperature" not in asked and asked["top_p"] == 0.5


def test_lengths_by_any_of_their_names(tiny: dllm.DiffusionModel) -> None:
    lm = DLLM(tiny, max_gen_toks=7)
    for given, expected in (
        ({"max_completion_tokens": 4}, 4), ({"max_gen_toks": None, "max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_gen_toks": 6}, 6), ({"max_length": 90}, 7), ({}, 7),
    ):  # fmt: skip
        assert lm._settings(given)["max_new_tokens"] == expected


def test_a_form_says_where_an_answer_ends(tiny: dllm.DiffusionModel) -> None:
    """A task's stop strings would cut it."""
    lm = DLLM(tiny, regex="[0-9]{3}")
    assert "stop_strings" not in lm._settings({"until": "x"})
    (answer,) = lm.generate_until([instance("Tom", until=list("0123456789"), max_gen_toks=8)], True)
    assert len(answer) == 3 and answer.isdecimal()


def test_special_tokens_in_a_document_are_text(tiny: dllm.DiffusionModel) -> None:
    lm = DLLM(tiny)
    text = lm.apply_chat_template([{"role": "user", "content": "say <|mdm_mask|>"}])
    ids = lm.tok_encode(text)
    assert tiny.facts.mask_token_id not in ids
    assert tiny.tokenizer.convert_tokens_to_ids("<|assistant|>") == ids[-1]


def test_special_tokens_before_a_begun_answer_are_text(tiny: dllm.DiffusionModel) -> None:
    """A task's ``gen_prefix`` is the beginning of the answer."""
    lm, mask = DLLM(tiny), tiny.facts.mask_token_id
    for said, begun in (("say <|mdm_mask|>", "The"), ("say it", "The <|mdm_mask|>"), ("a", "b")):
        history = [{"role": "user", "content": said}, {"role": "assistant", "content": begun}]
        ids = lm.tok_encode(lm.apply_chat_template(history, add_generation_prompt=False))
        start = [{"role": "user", "content": said}]
        assert mask not in ids
        assert ids == lm.tok_encode(lm.apply_chat_template(start)) + lm.tok_encode(begun)


def test_what_goes_on_with_a_begun_answer_has_no_blank_of_its_own(
    tiny: dllm.DiffusionModel,
) -> None:
    """Choices behind a ``gen_prefix`` are the rest of a text, not a turn of their own."""
    lm = DLLM(tiny)
    history = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The answer"}]
    begun = lm.apply_chat_template(history, add_generation_prompt=False)
    whole, rest = lm._encode_pair(begun, " Tom, Anna")
    assert rest == tiny.tokenizer("Tom, Anna")["input_ids"]
    assert [*whole, *rest] == tiny.tokenizer(f"{begun} Tom, Anna")["input_ids"]


def test_conversations_of_another_process_are_refused(tiny: dllm.DiffusionModel) -> None:
    """What the harness kept on disk would be taken for plain text."""
    for history in (
        [{"role": "user", "content": "Tom"}],
        [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Tom"}],
    ):
        text = DLLM(tiny).apply_chat_template(history)
        with pytest.raises(dllm.ConfigError, match="leave out cache_requests"):
            DLLM(tiny).generate_until([instance(text)], disable_tqdm=True)


def test_a_continuation_beyond_the_context_loses_its_beginning(tiny: dllm.DiffusionModel) -> None:
    lm = DLLM(tiny, samples=4)
    request = Instance("loglikelihood", {}, ("Tom", " Anna, Ben" * 200), 0, ("t", 0, 1))
    ((value, _),) = lm.loglikelihood([request], disable_tqdm=True)
    assert math.isfinite(value) and lm.usage.shortened == 1
    assert lm.scores[0].tokens == tiny.facts.context_length


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"smapler": "llada"}, "did you mean 'sampler'"),
        ({"sampler": "lada"}, "did you mean 'llada'"),
        ({"cache": "duall"}, "did you mean 'dual'"),
        ({"max_new_tokens": 9}, "unknown argument"),
        ({"estimator": "lada"}, "did you mean 'llada'"),
        ({"batch_size": "auto"}, "batch_size is a number here"),
    ],
)
def test_bad_arguments(tiny: dllm.DiffusionModel, given: dict[str, Any], message: str) -> None:
    with pytest.raises(dllm.DllmError, match=message):
        DLLM(tiny, **given)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reading the thousands of tasks that come with the harness."""
    import lm_eval.tasks

    small = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", small)


@pytest.mark.usefixtures("quick")
def test_command_line(cli: Run, tasks: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    result = cli(
        "eval", "--tasks", "my_reverse", "--include-path", str(tasks), "--chat", "--limit", "2",
        "--sampler", "threshold(0.9)", "--output", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "my_reverse" in result.stdout and "2 generations" in result.stderr
    record = json.loads(out.read_text())
    assert record["dllm"]["how"]["sampler"] == "threshold(0.9)"
    assert "samples" not in record and "scores" not in record["dllm"]
    result = cli(
        "eval", "--tasks", "my_choice", "--include-path", str(tasks), "--limit", "1", "--samples",
        "8", "--log-samples", "--output", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    scores = json.loads(out.read_text())["dllm"]["scores"]
    assert len(scores) == 3 and all(score["stderr"] > 0 for score in scores)
    assert [(score["task"], score["doc_id"]) for score in scores] == [("my_choice", 0)] * 3
    once = ("--samples", "1", "--log-samples", "--limit", "1", "--output", str(out))
    result = cli("eval", "--tasks", "my_choice", "--include-path", str(tasks), *once)
    told = json.loads(out.read_text(), parse_constant=pytest.fail)["dllm"]
    assert told["usage"]["largest_stderr"] is None and told["scores"][0]["stderr"] is None


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--adapter", "no/adapter"),
        ("--tokenizer", "no/tokenizer"),
        ("--quantization", "int99"),
    ],
)
def test_loading_options_are_heard(cli: Run, tasks: Path, option: str, value: str) -> None:
    folder = ("--include-path", str(tasks))
    result = cli("eval", "--tasks", "my_reverse", *folder, option, value)
    assert result.exit_code == 2 and value in result.stderr


@pytest.mark.usefixtures("quick")
def test_misspelt_parts_are_told_before_the_model_is_loaded(cli: Run, tasks: Path) -> None:
    told = {"--sampler": "lada", "--cache": "duall", "--estimator": "lada"}
    for option, value in told.items():
        result = cli(
            "eval", "--tasks", "my_reverse", "--include-path", str(tasks), "--model", "no/model",
            option, value,
        )  # fmt: skip
        assert result.exit_code == 2 and "did you mean" in result.stderr, result.stderr


@pytest.mark.usefixtures("quick")
def test_bad_input(cli: Run, tasks: Path, tmp_path: Path) -> None:
    missing = GENERATE.replace("my_reverse", "my_missing").format(file="/no/such/file.jsonl")
    (tmp_path / "missing.yaml").write_text(missing)
    (tmp_path / "docs.jsonl").write_text('{"question": "Copy this list: Tom, Anna, Ben"}\n')
    lacking = GENERATE.replace("my_reverse", "my_lacking").format(file=tmp_path / "docs.jsonl")
    (tmp_path / "lacking.yaml").write_text(lacking)
    cases = [
        ("did you mean 'my_reverse'", "my_revers", tasks),
        ("there is no task", ",", tasks),
        ("there is no folder", "x", Path("/no/such/folder")),
        ("cannot be run", "my_missing", tmp_path),
        ("'answer' is undefined", "my_lacking", tmp_path),
    ]
    for message, name, folder in cases:
        result = cli("eval", "--tasks", name, "--include-path", str(folder))
        assert (result.exit_code, result.stdout) == (2, ""), message
        assert message in result.stderr and "Traceback" not in result.stderr
