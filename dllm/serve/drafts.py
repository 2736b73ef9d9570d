"""``/v1/draft``: drafts for verifiers in other processes; `dllm.drafting.bridges.remote` asks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ..drafting.bridges.remote import OTHER_VOCABULARY, PATH
from ..drafting.bridges.service import Service as Drafts
from ..drafting.bridges.service import VocabularyError, patience_of
from ..drafting.drafters.diffusion import DiffusionDrafter
from ..drafting.vocabulary import fingerprint
from ..errors import CancelledError, ConfigError, DllmError, QueueFullError, one_line
from .http import Path, as_json, outcome, read_json
from .problems import Problem, problem_of
from .settings import Settings

if TYPE_CHECKING:
    from ..models import DiffusionModel

log = logging.getLogger("dllm.serve")
MOST_WAITING = 256  # messages
LARGEST = 1 << 24  # bytes
LONGEST_SID = 200  # characters


class DraftRoutes:
    """The sessions of ``drafts``, asked over HTTP.  One thread drafts, since sessions share a
    network; a message that waits longer than its sender does is not worked on."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        self._pool = ThreadPoolExecutor(1, "dllm-draft")
        self._room = threading.BoundedSemaphore(MOST_WAITING)

    @classmethod
    def of(cls, model: DiffusionModel) -> DraftRoutes | None:
        """Drafts of ``model``; None where it cannot draft."""
        vocabulary = ""
        if model.tokenizer is not None:
            vocabulary = fingerprint(model.tokenizer, model.facts.vocab_size)
        try:
            return cls(Drafts(DiffusionDrafter(model), vocabulary))
        except ConfigError:
            return None

    def paths(self) -> list[Path]:
        return [Path("POST", PATH + "/{action}", self.answer)]

    async def answer(self, request: Request) -> Response:
        arrived = time.monotonic()
        message = await read_json(request, LARGEST)
        if not isinstance(message, dict):
            raise Problem(400, "the message must be a JSON object", code="invalid_body")
        if len(str(message.get("sid", ""))) > LONGEST_SID:
            raise Problem(400, f"a sid has at most {LONGEST_SID} characters", "sid")
        try:
            patience = patience_of(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise Problem(400, f"the message is malformed: {one_line(error, 200)}") from None
        if not self._room.acquire(blocking=False):
            raise QueueFullError(f"{MOST_WAITING} messages wait already")
        try:
            work = self._pool.submit(
                self.drafts.handle, request.path_params["action"], message, arrived
            )
        except RuntimeError:  # the pool is closed
            self._room.release()
            raise CancelledError("the server is stopping") from None
        work.add_done_callback(lambda _: self._room.release())
        return as_json(await self._in_time(work, patience))

    async def _in_time(self, work: Future[dict[str, Any]], patience: float) -> Any:
        try:
            # What is at work cannot be interrupted, and finds out itself that it is late.
            return await asyncio.wait_for(asyncio.shield(outcome(work)), patience)
        except TimeoutError as error:
            work.cancel()  # if it has not begun
            raise Problem(504, str(error) or "no draft in time", code="late") from None
        except VocabularyError as error:
            raise Problem(409, str(error), code=OTHER_VOCABULARY) from None
        except KeyError as error:
            raise Problem(
                400, f"the message lacks {one_line(error, 200)}, or names no session"
            ) from None
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, DllmError):
                raise
            raise Problem(400, f"the message is malformed: {one_line(error, 200)}") from None

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class DraftServer:
    """A server that only drafts: ``dllm serve-drafter``."""

    def __init__(self, drafts: Drafts, settings: Settings) -> None:
        self.settings, self.draining = settings, False
        self.routes = DraftRoutes(drafts)

    def state(self) -> dict[str, Any]:
        status = "stopping" if self.draining else "ready"
        return {"status": status, "sessions": len(self.routes.drafts.sessions)}

    def exposition(self) -> bytes:
        sessions = len(self.routes.drafts.sessions)
        return f"# TYPE dllm_draft_sessions gauge\ndllm_draft_sessions {sessions}\n".encode()

    def failed(self, error: BaseException) -> Problem:
        problem = problem_of(error)
        if problem.status == 500:
            log.error("a message failed", exc_info=error)
        return problem

    def close(self) -> None:
        self.routes.close()
