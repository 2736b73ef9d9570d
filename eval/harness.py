"""Models of this library for lm-evaluation-harness (0.4.13; extra ``eval``).

>>> import lm_eval, dllm.eval.harness  # the import registers the name "dllm"
>>> lm_eval.simple_evaluate("dllm", {"pretrained": "nano", "sampler": "eb"}, tasks=["mine"])

Requests are answered in batches.  Generation honours ``until`` and ``max_gen_toks`` and stops
early; likelihoods are those of `dllm.score`.
"""

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once
from tqdm import tqdm

from ..api import as_completed
from ..cache import compose as compose_cache
from ..core.config import FILTERS, FORMATS, GenerationConfig
from ..core.errors import ConfigError, UnknownNameError
from ..likelihood.scoring import Score, ScoreRequest, Scoring, longest, score_requests, total_score
from ..models import load
from ..request.prompts import chat_openings, encode_chat, encode_continuation, encode_text
from ..request.requests import occurrences
from ..samplers import compose as compose_sampler

LOG = logging.getLogger(__name__)
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("temperature", *FILTERS)


@dataclass
class Usage:
    """What the answers of a `DLLM` cost, likelihoods apart from generations."""

    requests: int = 0
    tokens: int = 0
    nfe: int = 0
    computed: int = 0
    seconds: float = 0.0
    likelihoods: int = 0
    likelihood_nfe: int = 0
    largest_stderr: float = 0.0
    shortened: int = 0  # requests whose prompt or canvas was cut to fit the context


@dataclass(frozen=True)
class Scored(Score):
    """The score of a request, and which document of which task it belongs to."""

    task: str = ""
    doc_id: int | None = None


@register_model("dllm")
class DLLM(TemplateLM):  # type: ignore[misc]
    """A model with a sampler and a cache, as the harness wants it.

    ``pretrained``, ``quantization``, ``tokenizer``: as `dllm.load` takes them.  ``sampler``,
    ``cache`` and ``arguments`` (``steps``, ``temperature``, ``seed``, ...) go to `dllm.generate`
    and win over the task's; where an answer is shorter than ``block_length``, it is one block.
    ``batch_size``: requests decoded at a time (default 32); when one is finished, the next joins.
    ``max_gen_toks``: where a task does not say (default 256).  ``estimator``, ``samples``,
    ``early_stop``: see `dllm.score`; ``check_greedy`` (default off) answers whether a continuation
    is the greedy one, which a few tasks such as lambada need and which costs a forward per token.
    """

    def __init__(
        self, pretrained: Any = "nano", sampler: str = "threshold", cache: str = "none",
        batch_size: int | str | None = None, max_batch_size: int | None = None,
        device: str | None = None, dtype: str = "auto", adapter: str | None = None,
        quantization: str | None = None, tokenizer: Any = None,
        max_gen_toks: int = 256, estimator: str | None = None, samples: int = 128,
        early_stop: bool = False, check_greedy: bool = False, **arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        known = [*GenerationConfig.fields().keys() - {"max_new_tokens", "stop_strings"}]
        for name in arguments:
            if name not in known:
                own = list(inspect.signature(DLLM).parameters)[:-1]
                raise UnknownNameError("argument", name, [*own, *known])
        compose_sampler(sampler), compose_cache(cache)  # what is wrong is told before loading
        if isinstance(batch_size, str) and not batch_size.isdigit():
            raise ConfigError(f"batch_size is a number here, not {batch_size!r}")
        rows = int(batch_size or 32)
        self.batch_size = min(rows, max_batch_size) if max_batch_size else rows
        self.scoring = Scoring(
            estimator=estimator, samples=samples, early_stop=early_stop, greedy=check_greedy,
            cfg_scale=float(arguments.get("cfg_scale", 0)), seed=int(arguments.get("seed", 0)),
        )  # fmt: skip
        where: dict[str, Any] = {"device": device or "auto", "dtype": dtype}
        self.model = load(
            pretrained, adapter=adapter, quantization=quantization, tokenizer=tokenizer,
            **(where if isinstance(pretrained, str | os.PathLike) else {}),
        )  # fmt: skip
        if self.model.tokenizer is None:
            raise ConfigError(f"{self.model.name} came without a tokenizer: the harness needs text")
        self.tokenizer = self.model.tokenizer
        self._device = self.model.device
        self.max_gen_toks = max_gen_toks
        self.how = {"sampler": sampler, "cache": cache, **arguments}
        self.scores: list[Scored] = []  # of all likelihood requests so far, in their order
        self.usage = Usage()
        # Of a conversation: its ids, and how what follows it is encoded.
        self._rendered: dict[str, tuple[list[int], Callable[..., list[int]]]] = {}
        self._openings = chat_openings(self.tokenizer)

    # -- text and ids ---------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        eos = self.model.facts.eos_token_id
        if eos is None:
            raise ConfigError(f"{self.model.name} has no end token, which the harness needs")
        return eos

    @property
    def prefix_token_id(self) -> int:
        """What an empty context becomes."""
        bos = self.model.facts.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return int(self.model.facts.context_length)

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.name).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        text = str(self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        ))  # fmt: skip
        # Remembered: what users wrote is never a special token.
        ids = encode_chat(self.model, chat_history, continued=not add_generation_prompt)
        behind = encode_text if add_generation_prompt else encode_continuation
        self._rendered[text] = ids.tolist(), behind
        return text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids of a text."""
        if string in self._rendered:
            return self._rendered[string][0]
        if string.startswith(self._openings):
            raise ConfigError(
                "a prompt is a conversation that was not rendered here, so that its special tokens "
                "cannot be distinguished from text: leave out cache_requests, or a template in "
                "the task"
            )
        special = self.model.facts.bos_token_id is not None and add_special_tokens is not False
        return encode_text(self.tokenizer, string, add_special_tokens=special)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Behind a rendered conversation comes a turn of its own, or the rest of one."""
        if context in self._rendered:
            ids, encode = self._rendered[context]
            return ids, encode(self.tokenizer, continuation)
        whole, given = super()._encode_pair(context, continuation)
        return whole, given

    # -- likelihood -----------------------------------------------------------------------------

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """See `dllm.score`; choices of one question are known as such, for ``early_stop``."""
        prepared: list[ScoreRequest] = []
        groups: dict[Any, int] = {}
        for instance in requests:
            context, continuation = instance.args
            question = (instance.task_name, instance.doc_id, context)
            if context:
                prompt, text = self._encode_pair(context, continuation)
            else:
                prompt, text = [self.prefix_token_id], self.tok_encode(continuation, False)
            group = groups.setdefault(question, len(groups))
            prepared.append(self._request(prompt, text, group, max(1, len(continuation))))
        answers = []
        for instance, score in zip(requests, self._scored(prepared, disable_tqdm), strict=True):
            answers.append(self._keep(score, instance.task_name, instance.doc_id))
            self.cache_hook.add_partial("loglikelihood", instance.args, answers[-1])
        return answers

    def _loglikelihood_tokens(self, *_: Any, **__: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError  # called by `loglikelihood` of the base class alone

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Whole texts, in windows of the context; every token is scored once."""
        windows: list[ScoreRequest] = []
        owner: list[int] = []
        most = longest(self.model, self.scoring)
        for i, instance in enumerate(requests):
            ids = self.tok_encode(instance.args[0], False)
            result = get_rolling_token_windows(ids, self.prefix_token_id, most - 1, 1)
            for prompt, text in map(make_disjoint_window, result):
                windows.append(self._request(prompt, text, len(windows), 1))
                owner.append(i)
        parts: list[list[Score]] = [[] for _ in requests]
        for i, score in zip(owner, self._scored(windows, disable_tqdm), strict=True):
            parts[i].append(score)
        answers = []
        for instance, scores in zip(requests, parts, strict=True):
            answers.append(self._keep(total_score(scores), instance.task_name, instance.doc_id)[0])
            self.cache_hook.add_partial("loglikelihood_rolling", instance.args, answers[-1])
        return answers

    def _request(self, prompt: list[int], text: list[int], group: int, length: int) -> ScoreRequest:
        """A request that fits the context: the beginning is cut, if need be of the text, too."""
        most = longest(self.model, self.scoring)
        if len(prompt) + len(text) > most:
            self._shortened()
            text = text[-most:]
            prompt = prompt[max(0, len(prompt) + len(text) - most) :]
        return ScoreRequest(np.asarray(prompt, np.int64), np.asarray(text, np.int64), group, length)

    def _scored(self, requests: list[ScoreRequest], quiet: bool) -> Iterator[Score]:
        """Scores, in runs of whole questions: choices must meet to be compared."""
        batch: list[ScoreRequest] = []
        questions = [[*members] for _, members in groupby(requests, key=lambda one: one.group)]
        with tqdm(total=len(requests), desc="likelihood", disable=quiet) as bar:
            for members in questions:
                batch += members
                if len(batch) >= self.batch_size or members is questions[-1]:
                    yield from score_requests(self.model, batch, self.scoring)
                    bar.update(len(batch))
                    batch = []

    def _keep(self, score: Score, task: str = "", doc_id: int | None = None) -> tuple[float, bool]:
        """Count the score of a request; what the harness wants of it."""
        self.scores.append(Scored(**vars(score), task=task, doc_id=doc_id))
        self.usage.likelihoods += 1
        self.usage.likelihood_nfe += score.nfe
        self.usage.largest_stderr = max(self.usage.largest_stderr, score.stderr)
        return score.logprob, bool(score.greedy)

    # -- generation -----------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first of ``until``; requests of equal settings share batches."""
        fitted = [
            self._fit(self.tok_encode(instance.args[0]), self._settings(instance.args[1]))
            for instance in requests
        ]
        prompts, settings = [ids for ids, _ in fitted], [setting for _, setting in fitted]
        names = [repr(sorted(setting.items())) for setting in settings]
        # A task asks several times for several answers, however the requests are cut into batches.
        repetitions = occurrences([(*ids, name) for ids, name in zip(prompts, names, strict=True)])
        answers = [""] * len(requests)
        kinds: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            kinds.setdefault(name, []).append(i)
        with tqdm(total=len(requests), desc="generation", disable=disable_tqdm) as bar:
            for indices in kinds.values():
                indices.sort(key=lambda i: -len(prompts[i]))
                began = time.perf_counter()
                finished = as_completed(
                    self.model, [prompts[i] for i in indices], max_batch_size=self.batch_size,
                    repetitions=[repetitions[i] for i in indices],
                    **(self.how | settings[indices[0]]),
                )  # fmt: skip
                for k, out in finished:
                    answers[indices[k]] = out.text
                    self.usage.requests += 1
                    self.usage.tokens += len(out.tokens)
                    self.usage.nfe += out.nfe
                    self.usage.computed += out.computed
                    request = requests[indices[k]].args
                    self.cache_hook.add_partial("generate_until", request, out.text)
                    bar.update()
                self.usage.seconds += time.perf_counter() - began
        return answers

    def _settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `dllm.generate` from those of a task."""
        given = dict(given)
        until = given.pop("until", None) or []
        until = [until] if isinstance(until, str) else [text for text in until if text]
        lengths = [int(n) for name in LENGTH_NAMES if (n := given.pop(name, None)) is not None]
        new = min([*lengths, self.max_gen_toks][0], self.max_length - 1)
        result: dict[str, Any] = {"max_new_tokens": new}
        if not self.how.keys() & FORMATS:  # which say themselves where an answer ends
            result["stop_strings"] = tuple(until)
        drawn = bool(given.pop("do_sample", float(given.get("temperature") or 0) > 0))
        for name in SAMPLING:
            value = given.pop(name, None)
            if drawn and value is not None and name not in self.how:
                result[name] = value
        for name, value in given.items():
            warning_once(
                LOG, f"generation setting {name}={value!r} has no meaning here and is ignored"
            )
        return result

    def _fit(self, ids: list[int], setting: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """A prompt and a canvas that fit the context: half of it is for the answer, if wanted, and
        a prompt that is too long for the rest loses its beginning."""
        ids, wanted = ids or [self.prefix_token_id], setting["max_new_tokens"]
        new = min(wanted, max(self.max_length - len(ids), self.max_length // 2))
        room = self.max_length - new
        if new < wanted or len(ids) > room:
            self._shortened()
        setting = setting | {"max_new_tokens": new}
        if self.how.get("block_length", 0) > new:  # one for all tasks; some ask for short answers
            setting["block_length"] = new
        return ids[max(0, len(ids) - room) :], setting

    def _shortened(self) -> None:
        self.usage.shortened += 1
        warning_once(
            LOG,
            f"prompt and answer exceed the context of {self.max_length}: beginnings of prompts are "
            "cut or canvases shortened (counted in usage.shortened)",
        )
