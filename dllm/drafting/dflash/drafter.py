"""A block drafter at work: it reads what the verifier's layers say of the text and fills in a
block of masks behind it, in one small forward."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...core.canvas import IntArray
from ...core.errors import CheckpointError, ConfigError
from ...kernels.linear import Matrix
from .. import base
from ..drafters.followers import Followers
from ..drafters.hits import HitRates
from ..search.chains import SEARCHES, Search, SearchContext
from ..search.marginals import Marginals
from ..search.proxies import NGram
from .checkpoint import BlockCheckpoint, load_checkpoint
from .heads import WalkHead, confidence_of, head_of
from .network import BlockNetwork, TextKeys
from .walks import NGRAMS, Kind, Text, Walk, candidates

SOURCE = "walk"
HEADS = ("auto", "none", "chain", "tree")


@base.DRAFTERS.register("dflash", paper="DFlash: Block Diffusion for Flash Speculative Decoding",
                   arxiv="2602.06036")  # fmt: skip
@dataclass
class BlockDrafter(base.Drafter):
    """A block-diffusion drafter (DFlash) of transformers', z-lab's or speculators' format.

    ``model``: folder, hub id or `BlockCheckpoint`.  ``search``: how its marginals become a draft:
    default "argmax" at temperature 0, "coupled" above; others are "cps", "sample" and
    "best_first_tree".
    ``head``: "auto" drafts with the head of the checkpoint (DSpark's Markov head, DFlash 2's
    selector), if it brings one and no search is asked for: a tree of at most ``nodes`` tokens (31)
    where the length controller knows what a node costs (`adaptive`) and rule and verifier take
    trees, else a chain.  "tree" and "chain" say which; "none" leaves the head out.
    ``ngram_candidates``: what followed the same tokens earlier in the text is among the candidates
    of every place, also behind the block, so that no lookup is needed beside it.
    """

    model: Any = ""
    search: Any = None
    head: str = "auto"
    nodes: int = 31
    ngram_candidates: bool = True

    def __post_init__(self) -> None:
        from .. import register_all

        register_all()
        self.hits = HitRates(prior=4.0), HitRates(prior=4.0)  # greedy, and where noise is added
        if not isinstance(self.model, BlockCheckpoint):
            self.model = load_checkpoint(self.model)
        if self.head not in HEADS:
            raise ConfigError(f"head is one of {', '.join(HEADS)}, not {self.head!r}")
        unfit = self.search is not None or not self.model.walks or self.nodes < 1
        if self.head in ("chain", "tree") and unfit:
            raise ConfigError(
                f"head={self.head!r} takes a checkpoint with a Markov head or selector, no "
                "search and at least one node; search='best_first_tree' makes trees of marginals, "
                "search='sample' draws from them"
            )
        if self.search is not None:
            self.search = base.single(self.search, SEARCHES, Search)
        self._bound: tuple[Any, Binding] | None = None

    @property
    def target_layer_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.model.config.target_layer_ids)

    @property
    def distributions(self) -> frozenset[base.Distribution]:  # type: ignore[override]
        kind = base.Distribution.POINT if self.search is None else self.search.distribution
        return frozenset({kind})

    @property
    def trees(self) -> bool:  # type: ignore[override]
        return self.search is not None and bool(self.search.trees)

    def open(self, request: base.DraftRequest) -> base.Drafting:
        if request.verifier is None:
            raise ConfigError(
                f"{self.model.name} reads the verifier's hidden states, which this engine does not "
                "hand out: use dllm.speculate, or a drafter that needs none"
            )
        bound = self._bound
        if bound is None or bound[0] is not request.verifier.hf:
            bound = (request.verifier.hf, Binding(self.model, request.verifier.hf))
            self._bound = bound
        return BlockDrafting(self, bound[1], request)

    def propose_all(self, work: Sequence[tuple[Any, IntArray, base.Budget]]) -> list[base.Draft]:
        """One forward for all sequences that can draft."""
        drafts = [base.EMPTY] * len(work)
        ready = [i for i, (drafting, prefix, _) in enumerate(work) if drafting.has_read(prefix)]
        if ready:
            hidden, logits = work[ready[0]][0].bound.block([work[i][0] for i in ready])
            for row, i in enumerate(ready):
                drafting, _, budget = work[i]
                drafts[i] = drafting.pick(hidden[row], logits[row], budget)
        return drafts

    def __repr__(self) -> str:
        search = "auto" if self.search is None else self.search.name
        return f"dflash({self.model.name}, search={search})"


def head_without_bias(hf: Any) -> Any:
    """The head of a verifier's network.  Raises `ConfigError` for one that adds a bias."""
    head = hf.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError("a block drafter needs a verifier with a head without bias")
    return head


class Binding:
    """A drafter with the embedding and the head of one verifier, shared by its sequences."""

    def __init__(self, checkpoint: BlockCheckpoint, hf: Any) -> None:
        embedding, head = hf.get_input_embeddings(), head_without_bias(hf)
        width, config = embedding.weight.shape[1], checkpoint.config
        layers = hf.config.get_text_config().num_hidden_layers
        last = max(config.target_layer_ids or [0])
        if width != config.hidden_size or last >= layers - 1:
            raise ConfigError(
                f"{checkpoint.name} was trained for a verifier of width {config.hidden_size} with "
                f"more than {last + 1} layers, not for this one of width {width} with {layers}"
            )
        weight = head.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.network = BlockNetwork(checkpoint, self.device, self.dtype)
        self.embedding, self.mask_id = embedding, config.mask_token_id
        self.variant, self.scale = checkpoint.variant, checkpoint.variant.input_embedding_scale
        if self.scale is None and hasattr(embedding, "embed_norm"):  # transformers leaves it out
            self.scale = 1.0
        ids = checkpoint.draft_ids
        rows = len(embedding.weight)
        if config.mask_token_id >= rows or (ids is not None and int(ids[-1]) >= len(weight)):
            raise CheckpointError(
                f"{checkpoint.name} speaks of token {config.mask_token_id} as its mask and drafts "
                f"ids that a verifier with {rows} does not have: it was trained for another"
            )
        self.draft_ids = None if ids is None else ids.to(self.device)
        kept = checkpoint.head
        if kept is None:
            kept = weight if ids is None else weight.detach()[self.draft_ids].clone()
        kept = kept.to(self.device, self.dtype)
        self.head: Any = head if kept is weight else Matrix(kept)
        with torch.inference_mode():
            self.walk = head_of(checkpoint, self.device, embedding.weight, kept)
            self.sure = confidence_of(checkpoint, self.device, embedding.weight)

    @torch.inference_mode()
    def block(self, drafting: Sequence["BlockDrafting"]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (N, K, H) and logits (N, K, v) of the K drafting rows of each block."""
        size, variant = self.network.size, self.variant
        ids = torch.full((len(drafting), size), self.mask_id, device=self.device)
        ids[:, 0] = torch.tensor([d.anchor for d in drafting], device=self.device)
        if self.scale is None:
            embedded = self.embedding(ids)
        else:
            embedded = F.embedding(ids, self.embedding.weight) * self.scale
        hidden = self.network.draft([d.text for d in drafting], embedded)
        if not variant.sample_from_anchor:
            hidden = hidden[:, 1:]
        logits = self.head(hidden) * variant.output_multiplier
        cap = variant.final_logit_softcapping
        return hidden, torch.tanh(logits / cap) * cap if cap else logits


@dataclass
class BlockDrafting(base.Drafting):
    """A block drafter on one sequence: keys and values of its text, and the last token."""

    part: BlockDrafter
    bound: Binding
    request: base.DraftRequest
    text: TextKeys = field(init=False)
    anchor: int = -1
    rounds: int = 0
    learnt: int = 0
    unread: list[torch.Tensor] = field(default_factory=list)  # hidden states of the last tokens
    kinds: list[Kind] = field(default_factory=list)  # of the nodes of the last draft

    def __post_init__(self) -> None:
        self.followers = Followers(NGRAMS)
        self.hits = self.part.hits[self.request.temperature > 0]
        self.text = self.bound.network.new_text()
        at = self.request.temperature
        self.search: Search = self.part.search or SEARCHES["coupled" if at > 0 else "argmax"]()
        self.proxy = NGram(vocab_size=self.request.vocab_size)
        walks = self.part.head != "none" and self.part.search is None
        self.walk: WalkHead | None = self.bound.walk if walks else None

    def observe(self, feedback: base.Feedback) -> None:
        """Take the hidden states of what was fed and kept."""
        if feedback.draft.source == SOURCE and len(self.kinds) >= len(feedback.draft):
            self.hits.update_tree(self.kinds, feedback)
        self.kinds = []
        if feedback.hidden is None:
            return
        fresh = len(feedback.hidden) - len(feedback.draft)
        kept = [*range(fresh), *(fresh + node for node in feedback.path)]
        if feedback.emitted and len(feedback.path) == len(feedback.emitted):
            kept.pop()  # the text ended with an accepted token
        whole = kept == list(range(len(kept)))
        self.unread.append(feedback.hidden[: len(kept)] if whole else feedback.hidden[kept])

    def has_read(self, prefix: IntArray) -> bool:
        """Whether everything before the last token is read: not before the first round.  What was
        fed in rounds without a draft is read at once, when there is to be one."""
        self.anchor = int(prefix[-1])
        if self.text.length + sum(map(len, self.unread)) != len(prefix) - 1:
            return False
        if self.unread:
            self.bound.network.read(self.text, torch.cat(self.unread))
            self.unread = []
        if self.walk is not None:
            self.followers.learn(prefix)
        else:
            self.proxy.learn(prefix.tolist(), len(prefix) - self.learnt)
        self.learnt = len(prefix)
        self.prefix = prefix
        return True

    @torch.inference_mode()
    def pick(self, hidden: torch.Tensor, logits: torch.Tensor, budget: base.Budget) -> base.Draft:
        """A draft from the hidden states (block - 1, H) and logits (block - 1, v) of a block."""
        self.rounds += 1
        rows = min(len(hidden), max(1, budget.room))
        hidden, logits = hidden[:rows], logits[:rows]
        clock = base.clock_of(self.bound.device)
        began = clock()
        if self.walk is not None:
            draft = self._walked(self.walk, hidden, logits, budget)
        else:
            context = SearchContext(
                self.prefix, self.proxy, self.request.temperature, self.request.noise_key,
                self.request.draft_key, self.rounds,
            )  # fmt: skip
            marginals = self._marginals(logits, len(self.prefix))
            length = budget.chain_length(marginals.confidence)
            draft = self.search.find(marginals, length, context) if length else base.EMPTY
        return replace(draft, search_seconds=clock() - began)

    def _marginals(self, logits: torch.Tensor, first: int) -> Marginals:
        """Distributions (w, V), or (w, v) with their ids where the vocabulary is trimmed."""
        request, ids = self.request, self.bound.draft_ids
        if ids is not None and self.search.distribution is base.Distribution.POINT:
            log_q = (logits.float() / (request.temperature or 1.0)).log_softmax(-1)
            return Marginals(log_q, first, request.stop_ids, ids.expand(len(log_q), -1))
        if ids is not None:
            shape = (len(logits), request.vocab_size)
            logits = logits.new_full(shape, -torch.inf).index_copy(1, ids, logits)
        return Marginals.from_logits(
            logits, first, vocab_size=request.vocab_size, banned=(self.bound.mask_id,),
            temperature=request.temperature, stop_ids=request.stop_ids,
        )  # fmt: skip

    def _walked(
        self, head: WalkHead, hidden: torch.Tensor, logits: torch.Tensor, budget: base.Budget
    ) -> base.Draft:
        """What head and text say together, left to right: the best prefixes, or the best path."""
        values, at = candidates(logits)
        named = at if self.bound.draft_ids is None else self.bound.draft_ids[at]
        values = values.masked_fill(named == self.bound.mask_id, -torch.inf)
        temperature = self.request.temperature
        noise = None
        if temperature > 0:  # both sides then prefer the same tokens
            rows = Marginals(values, len(self.prefix), self.request.stop_ids, named)
            noise = rows.noise_at(self.request.noise_key, named).cpu().numpy()
        sure = None if self.bound.sure is None else self.bound.sure.over(hidden)
        walk = Walk(head.over(hidden, at), self.anchor, values.cpu().numpy(), named.cpu().numpy(),
                    temperature, noise, sure)  # fmt: skip
        priced = self.part.head == "auto" and budget.nodes is not None
        tree = (priced or self.part.head == "tree") and self.request.trees
        ngrams = self.part.ngram_candidates and (tree or sure is None)
        context = tuple(self.prefix[-NGRAMS[-1] :].tolist())
        text = Text(self.followers, context, self.hits) if ngrams else None
        nodes, deepest = self.part.nodes, min(budget.length, budget.room)
        found = walk.grow(deepest, nodes, text, tree, budget.nodes if tree else None)
        chances = np.exp([node.chance for node in found])
        n = budget.tree_size(np.exp([node.score for node in found])) if tree else (
            budget.chain_length(chances)
        )  # fmt: skip
        self.kinds = [node.mark[0] for node in found[:n]] if ngrams else []
        tokens = np.array([node.token for node in found], np.int64)
        ends = np.flatnonzero(np.isin(tokens, self.request.stop_ids) & (not tree))
        return base.Draft(
            tokens[:n], np.array([node.parent for node in found[:n]], np.int64) if tree else None,
            confidence=chances[:n], end=int(ends[0]) if ends.size else None, source=SOURCE,
        )  # fmt: skip
