"""A proposer for vLLM's ``custom_class`` method of speculative decoding (vLLM 0.22 and later).

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "dllm.drafting.bridges.vllm.DllmProposer", "num_speculative_tokens": 16}'

vLLM treats drafts as point masses, which is lossless for any chain.  The drafter is read from the
environment variable ``DLLM_DRAFTER`` (a spec or a model, default ``prompt_lookup``).  Not every
drafter can work here: vLLM keeps its scores, which ``token_recycling`` learns from; with tensor
parallelism every rank drafts for itself, and ``arbiter`` and ``remote`` depend on clocks, which
differ between ranks.  Written after the documented interface; it was tested without vLLM, which
needs an accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...canvas import IntArray
from ...errors import ConfigError
from ..base import Budget, DraftRequest
from ..naming import make_drafter
from .follow import TextFollower

VARIABLE = "DLLM_DRAFTER"
LEAST = 512  # tokens a new state has room for; it is made anew, twice as long, when they are used


class DllmProposer:
    """Drafts for the running batch.

    Row indices are no request ids: a row's state is found by content, the one whose text is the
    longest prefix of the row's.  States of texts that are not in the batch any more are closed (a
    request that comes back gets a new one), and a state holds room for at most twice its text, not
    for the longest that the model takes.  Drafting is a function of the tokens only, so that all
    ranks of a tensor-parallel group draft the same.  Raises `ConfigError` for drafters that cannot
    work here.
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
        result = make_drafter(drafter or os.environ.get(VARIABLE, "prompt_lookup"))
        assert result is not None
        if result.needs_scores:
            raise ConfigError(
                "token_recycling learns from the verifier's scores, which vLLM does not hand out: "
                "choose another drafter"
            )
        parallel = getattr(vllm_config, "parallel_config", None)
        ranks = int(getattr(parallel, "tensor_parallel_size", 1))
        if result.timed and ranks > 1:
            raise ConfigError(
                f"{result!r} drafts by the clock, and {ranks} ranks must draft the same: choose "
                "a drafter without 'arbiter' and 'remote'"
            )
        self.drafter = result
        self.states: list[TextFollower] = []

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
        present: list[TextFollower] = []
        for row, sampled in enumerate(sampled_token_ids):
            tokens = np.asarray(token_ids_cpu[row, : int(num_tokens_no_spec[row])], np.int64)
            state, draft = self._find(tokens), []
            room = min(self.most, self.limit - len(tokens) - 1)
            if len(sampled) and room > 0:
                state = self._roomy(state, tokens, room)
                draft = self._draft(state, tokens, room)
            drafts.append(draft)
            if state is not None:
                present.append(state)
        for state in self.states:
            if not any(state is one for one in present):
                state.close()
        self.states = [state for state in self.states if any(state is one for one in present)]
        return drafts

    def _draft(self, state: TextFollower, tokens: IntArray, room: int) -> list[int]:
        draft = state.propose(tokens, Budget(room, room))
        if not draft.is_chain:
            raise ConfigError("vLLM takes chains: choose a drafter and a search without trees")
        result: list[int] = draft.tokens[:room].tolist()
        return result

    def _find(self, tokens: IntArray) -> TextFollower | None:
        """The state of the longest text that ``tokens`` go on from."""
        best: TextFollower | None = None
        for state in self.states:
            known = len(state.tokens)
            longer = best is None or known > len(best.tokens)
            if longer and known <= len(tokens) and np.array_equal(state.tokens, tokens[:known]):
                best = state
        return best

    def _roomy(self, state: TextFollower | None, tokens: IntArray, room: int) -> TextFollower:
        """``state``, or a new one where there is none or its room is used up."""
        if state is not None and len(tokens) + room < state.limit:
            return state
        if state is not None:
            state.follow(tokens)
            state.close()
            self.states = [one for one in self.states if one is not state]
        limit = min(self.limit, max(LEAST, 2 * (len(tokens) + room)))
        request = DraftRequest(tokens, self.vocab_size, (), limit)
        new = TextFollower(self.drafter.open(request), tokens.copy(), limit=limit)
        self.states.append(new)
        return new
