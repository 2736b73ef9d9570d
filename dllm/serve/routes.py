"""What a model answers: completions, infills, likelihoods, and what is known of it."""

import math
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..core.errors import ConfigError, PromptError
from ..models import DiffusionModel
from ..models.checkpoint import BUNDLED
from ..request.prompts import check_ids, encode_chat, encode_text, tokenizer_of
from . import bodies
from .http import Client, Path, Streaming, as_json, unless_gone
from .problems import Problem, invalid
from .requests import GenerateRequest, read_chat, read_infill, read_text
from .responses import ResponseBody, in_responses, read_response
from .service import Service
from .settings import SAMPLER
from .stream import Stream

INFORMATION = (str, int, float, bool, type(None))


class ModelRoutes:
    """What the model of a `Service` writes and scores, and what is known of it."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def paths(self) -> list[Path]:
        return [
            Path("POST", "/v1/chat/completions", self.chat, bodies.ChatBody),
            Path("POST", "/v1/completions", self.completions, bodies.TextBody),
            Path("POST", "/v1/responses", self.responses, ResponseBody),
            Path("POST", "/v1/responses/input_tokens", self.input_tokens, ResponseBody),
            Path("POST", "/v1/infill", self.infill, bodies.InfillBody),
            Path("POST", "/v1/score", self.score, bodies.ScoreBody),
            Path("POST", "/v1/step", self.step, bodies.StepBody),
            Path("GET", "/v1/models", self.models),
            Path("GET", "/v1/models/{name:path}", self.model),
            Path("POST", "/tokenize", self.tokenize, bodies.TokenizeBody),
            Path("POST", "/detokenize", self.detokenize, bodies.DetokenizeBody),
            Path("GET", "/tokenizer_info", self.tokenizer_info),
        ]

    async def chat(self, request: Request) -> Response:
        """Messages in, an answer out."""
        return await self._write(request, read_chat)

    async def completions(self, request: Request) -> Response:
        """Text or ids to continue, one or several; with ``suffix`` the middle is written."""
        return await self._write(request, read_text)

    async def responses(self, request: Request) -> Response:
        """A text or items in, items out.  Nothing is kept between requests."""
        try:
            return await self._write(request, read_response)
        except (ConfigError, PromptError, Problem) as error:
            raise in_responses(self.service.problem(error)) from error

    async def input_tokens(self, request: Request) -> Response:
        """How many tokens the input of a response has."""
        service = self.service
        ask = await service.reader.read(request, read_response)
        service.check(ask)
        (prompt,) = ask.prompts
        counting = service.encoded([prompt], lambda model: service.chats.prompt(ask, model, prompt))
        ids = await unless_gone(request, counting)
        return as_json({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def infill(self, request: Request) -> Response:
        """A text with ``[[8]]`` for a hole of 8 tokens, ``[[*]]`` for one that is measured."""
        return await self._write(request, read_infill)

    async def _write(self, request: Request, read: Callable[[Any], GenerateRequest]) -> Response:
        arrived, service = time.monotonic(), self.service
        ask = await service.reader.read(request, read)
        return await unless_gone(request, self._answer(ask, request.state.client, arrived))

    async def _answer(self, ask: GenerateRequest, client: Client, arrived: float) -> Response:
        service = self.service
        started, reply = await service.start(ask, client), service.reply(ask)
        if ask.stream:
            chunks = aiter(Stream(service, ask, reply, started, arrived))
            return await Streaming.begun(service, reply.failure, chunks)
        return as_json(await service.whole(reply, started, reply.id, arrived))

    async def score(self, request: Request) -> Response:
        """How likely continuations are, with standard errors."""
        service = self.service
        body = await service.reader.read(request, bodies.ScoreBody.read)
        service.check_model(body.model)
        texts = [body.continuation] if isinstance(body.continuation, str) else body.continuation
        asked = service.likelihoods.score(body.question or "", texts, body.scoring)
        data = [
            {"index": index, "logprob": one.logprob, "tokens": one.tokens, "forwards": one.nfe,
             "stderr": one.stderr if math.isfinite(one.stderr) else None,
             "computed": one.computed, "greedy": one.greedy}
            for index, one in enumerate(await unless_gone(request, asked))
        ]  # fmt: skip
        return as_json({"object": "list", "model": service.name, "data": data})

    async def step(self, request: Request) -> Response:
        """One read-only forward: what the model predicts at undecided positions, with
        log-probabilities.  Positions count from the start of the text."""
        service = self.service
        body = await service.reader.read(request, bodies.StepBody.read)
        service.check_model(body.model)
        if (body.text is None) == (body.tokens is None):
            raise invalid("text", "give text or tokens, one of them")
        text = body.tokens if body.text is None else body.text
        asked = service.likelihoods.step(body.question, text, {"top": body.top, **body.how})
        guesses = await unless_gone(request, asked)
        data = [
            {"position": int(at), "top": [
                {"token": service.spelling.piece(token), "id": token, "logprob": round(logprob, 6)}
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]}
            for at, tokens, logprobs in zip(
                guesses.positions, guesses.tokens.tolist(), guesses.logprobs.tolist(), strict=True
            )
        ]  # fmt: skip
        return as_json({"object": "list", "model": service.name, "data": data})

    async def models(self, request: Request) -> Response:
        """The model that is served."""
        return as_json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """The same, by name."""
        self.service.check_model(request.path_params["name"])
        return as_json(self._card())

    async def tokenize(self, request: Request) -> Response:
        """The ids of a text or of messages, as a request with them would have."""
        service = self.service
        body = await service.reader.read(request, bodies.TokenizeBody.read)
        service.check_model(body.model)
        prompt, template = body.question or "", dict(body.chat_template_kwargs or {})
        if body.tools:
            template["tools"] = [tool.model_dump(exclude_unset=True) for tool in body.tools]

        def encoded(model: DiffusionModel) -> list[int]:
            if isinstance(prompt, str):
                return encode_text(tokenizer_of(model), prompt, body.add_special_tokens)
            continued, ready = body.continue_final_message, body.add_generation_prompt
            return [*map(int, encode_chat(model, prompt, continued, ready, template))]

        ids = await unless_gone(request, service.encoded([prompt], encoded))
        answer = {"count": len(ids), "max_model_len": service.model.facts.context_length,
                  "tokens": ids}  # fmt: skip
        if body.return_token_strs:
            answer["token_strs"] = [service.spelling.piece(token) for token in ids]
        return as_json(answer)

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        service = self.service
        body = await service.reader.read(request, bodies.DetokenizeBody.read)
        service.check_model(body.model)

        def decoded(model: DiffusionModel) -> str:
            return service.spelling.decode(check_ids(model, body.tokens).tolist(), special=True)

        text = await unless_gone(request, service.encoded([body.tokens], decoded))
        return as_json({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """What the tokenizer is told, as in its ``tokenizer_config.json``."""
        tokenizer = tokenizer_of(self.service.model)
        told = {k: v for k, v in tokenizer.init_kwargs.items() if isinstance(v, INFORMATION)}
        return as_json(told | tokenizer.special_tokens_map | {
            "tokenizer_class": type(tokenizer).__name__, "chat_template": tokenizer.chat_template,
            "model_max_length": self.service.model.facts.context_length,
        })  # fmt: skip

    def _card(self) -> dict[str, Any]:
        service = self.service
        return {
            "id": service.name, "object": "model", "created": service.started, "owned_by": "dllm",
            "root": service.model.name, "parent": None,
            "max_model_len": service.model.facts.context_length,
            "dllm": {
                "family": service.model.family.name, "bundled": service.model.name in BUNDLED,
                "sampler": service.settings.sampler or SAMPLER,
                "caches": list(service.sessions),
                "defaults": {
                    k: v for k, v in service.model.generation_defaults.items()
                    if isinstance(v, int | float | str)
                },
            },
        }  # fmt: skip
