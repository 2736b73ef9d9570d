"""A proposer for vLLM's ``custom_class`` method of speculative decoding (vLLM 0.22 and later).

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "dllm.drafting.bridges.vllm.DllmProposer", "num_speculative_tokens": 16}'

vLLM treats drafts as point masses, which is lossless for any chain.  The drafter is read from the
environment variable ``DLLM_DRAFTER`` (a spec or a model, default ``prompt_lookup``).  Written
after the documented interface; it was tested without vLLM, which needs an accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...canvas import IntArray
from ...errors import ConfigError
from ..api import make_drafter
from ..base import Budget, Drafting, Request

VARIABLE = "DLLM_DRAFTER"
STATES = 256  # sequences whose state is kept


@dataclass
class State:
    """A drafter on one sequence, recognised by its text."""

    drafting: Drafting
    tokens: IntArray


class DllmProposer:
    """Drafts for the running batch.

    Row indices are no request ids: a row's state is found by content, the one whose text is the
    longest prefix of the row's.  Drafting is a function of the tokens only, so that all ranks of a
    tensor-parallel group draft the same.
    """

    def __init__(self, vllm_config: Any, drafter: Any = None) -> None:
        try:
            speculative, model = vllm_config.speculative_config, vllm_config.model_config
            self.most = int(speculative.num_speculative_tokens)
            self.limit, self.vocab_size = int(model.max_model_len), int(model.get_vocab_size())
        except AttributeError as error:
            raise ConfigError(
                f"this is no vLLM configuration with speculative decoding: {error}"
            ) from error
        self.drafter = make_drafter(drafter or os.environ.get(VARIABLE, "prompt_lookup"))
        self.states: list[State] = []

    def load_model(self, target_model: Any) -> None:
        """The drafter is loaded already."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """At most ``num_speculative_tokens`` ids per row; an empty list skips the row.

        ``sampled_token_ids``: ids each row emitted in this step (none: do not draft);
        ``token_ids_cpu[i, :num_tokens_no_spec[i]]`` is the committed text of row i.
        """
        del slot_mappings
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            tokens = np.asarray(token_ids_cpu[row, : int(num_tokens_no_spec[row])], np.int64)
            room = min(self.most, self.limit - len(tokens) - 1)
            drafts.append(self._draft(tokens, room) if len(sampled) and room > 0 else [])
        return drafts

    def _draft(self, tokens: IntArray, room: int) -> list[int]:
        state = self._state(tokens)
        state.tokens = tokens.copy()
        draft = state.drafting.propose(tokens, Budget(room, room))
        if not draft.is_chain:
            raise ConfigError("vLLM takes chains: choose a drafter and a search without trees")
        found: list[int] = draft.tokens[:room].tolist()
        return found

    def _state(self, tokens: IntArray) -> State:
        """The state of this text, made when it is new; the most recent are kept."""
        best: State | None = None
        for state in self.states:
            known = len(state.tokens)
            longer = best is None or known > len(best.tokens)
            if longer and known <= len(tokens) and np.array_equal(state.tokens, tokens[:known]):
                best = state
        if best is None:
            assert self.drafter is not None
            request = Request(tokens, self.vocab_size, (), self.limit)
            best = State(self.drafter.open(request), tokens)
        else:
            self.states.remove(best)
        self.states.append(best)
        for old in self.states[:-STATES]:
            old.drafting.close()
        del self.states[:-STATES]
        return best
