"""The reasons in docs/fidelity.md: what is not replayed to the end, and where defaults differ."""

from __future__ import annotations

OVERWRITES = (
    "The last top-k of the official run takes more positions than are eligible and masks decided "
    "ones; such a case is compared up to there."
)
RECONSTRUCTED = "No official code was at hand"

# Recorded file -> what of it deviates.
ROUTINES: dict[str, str] = {
    "daedal_llada": "With `ReleasedDaedal`: an insertion beyond the largest canvas drops its end, "
    "decided or not, and an answer without an end of text stays as long as it is. Rows of a batch "
    "do not see the padding of shorter prompts.",
    "llada21_edit": "Replayed on a canvas that ends with a block, as the official one does before "
    "its text is cut.",
    "remdm_llada": "The official routine samples at temperature 1; recorded and replayed is its "
    "argmax. With fewer steps than positions it re-masks arbitrary ones: not recorded.",
    "dpad_llada": "With `dpad`; the recorded draws replace this library's noise. Behind an end "
    "of text the official code fills to the end.",
    "dpad_dream": "As for LLaDA, and `force_first` of the tests where cached: the opening pass of "
    "a block commits exactly its first position.",
    "t2m_remask_llada2": "As `llada21_edit`; with `ReleasedBlockCache`, because the released "
    "code keeps the keys and values of a block's last forward, without what that decided.",
    "window_diffusion_dream": "With `force_first` of the tests: a refresh commits the first "
    "mask. " + OVERWRITES,
    "freedave_llada": "Not replayed: eager acceptance over several blocks. There the official code "
    "goes on drafting from predictions made before its last commits and keeps the first draft "
    "unchecked, so that the text is no longer that of the base. A draft is committed one "
    "forward earlier, so after each forward the official canvas lies between two of ours. Official "
    "drafts repeat once they are complete, and a forward may feed nothing else: not paid for here.",
    "freedave_dream": "As for LLaDA. In eager mode the official code also overwrites the first "
    "position of a block.",
    "lopa_dream": "Every branch of every round is compared. The official code keeps the "
    "logits of the row left of the open blocks, this one computes that row again: the same "
    "where attention is block-causal; where it is not, with `ReleasedLoPA` and "
    "`ReleasedD2F`. With nothing to try the official code feeds the row "
    "twice.",
    "d3llm_multi_block_dream": "With `ReleasedDelayed`: of the positions fed the first "
    "is predicted from its own row, because the slice is shifted and not the canvas. Of "
    "cached runs with an early stop only those are recorded in which no decided block waits "
    "to be kept when a text ends: the official code then marks the blocks behind the end as "
    "kept without having computed them, and what waits in front of them is kept twice.",
    "dkv_cache_llada_greedy": "With `llada(remasking=random)`; numbers that give the "
    "recorded order replace this library's noise, because the official ones are not at hand.",
    "apd_dream": 'With `speculate(rule="apd", search="apd")`; its baseline from left to right with '
    "`threshold(tau=0)+blocks`. The official code keeps the verifier's logits of the last token, "
    "this one feeds that token again, with the draft.",
    "localleap_llada": "A third-party copy of the authors' code.",
    "localleap_dream": "A third-party copy of the authors' code.",
    "dawn_llada": "With `ReleasedDAWN`: once every candidate is taken or struck out, the "
    "released loop goes on and writes over the first token of the canvas.",
    "dawn_dream": "As for LLaDA.",
    "dcd_llada": "With `ReleasedDCD` where cached: what the window has left and the padding "
    "behind an end of text stay as they were until the next refresh.",
    "dcd_dream": "As for LLaDA.",
    "dsb_llada": "Where cached with `ReleasedDSB` and `ReleasedDSBCache`: the "
    "official code also commits in the suffix that is only to be computed, because its mask "
    "is cut by a position in the canvas, in an array that begins with the slice.",
    "dsb_dream": "Where cached with `ReleasedDSB` and `ReleasedDSBCache`: every full "
    "pass commits exactly the first mask, and the first position of a fed slice is predicted "
    "from its own row.",
    "d2cache_llada": "With `ReleasedD2`: the released code never updates its confidences "
    "(it assigns to a copy), and its block shrinks with every commit (it is narrowed in place).",
    "d2cache_dream": "As for LLaDA; the last position of the prompt is fed only if it scores a "
    "chosen mask.",
    "dinfer_blockwise": "After an early stop the official code fills behind the block, this one "
    "behind the stop id: compared is the text.",
    "fastdllm_v1_llada_factor": "With `ReleasedFactor`: the scan also commits the last-ranked "
    "position when it alone fails its bound.",
    "wedlm_stream": "The engine feeds the prompt alone in its first forward and what was decided "
    "last in one more; here the prompt goes with the first window, and what nobody will read is "
    "not fed. Its window looks past `max_new_tokens`, and what it decides there is seen by what is "
    "left to decide: replayed on a canvas that is longer by a window.",
    "wedlm_blocks": "With `threshold` or `fixed`, and `ReleasedBlocks`: the official "
    "code knows masks by their id, and one that the model proposes counts as undecided from "
    "the next block on. By default `suppress_mask` proposes none.",
    "s2d2_llada21": "With the recorded draws and, in place of refused drafts, the recorded tokens, "
    "whose support is compared. Released code drafts and verifies in one step; here these are two, "
    "edits come with the first, and a finished block is stored by the next forward.",
    "s2d2_sdar": "As for LLaDA2.1. Cases that fall back to the leftmost masks with `Sequential`.",
    "r2_dllm_llada": "Its factor cases with the official scan (`ReleasedFactor`).",
}

# (kind, registered name) -> where its default differs from the published code, or why no case.
METHODS: dict[tuple[str, str], str] = {
    ("sampler", "daedal"): "An insertion is as long as there is room for, an answer without an end "
    "of text gets another block, and the text ends where its end is decided; the first length may "
    "grow geometrically (`growth`).",
    (
        "sampler",
        "dreamon",
    ): "No recorded case: a loop of the published rules is compared on a small "
    "checkpoint. Each hole has bounds of its own, and `delete_to_right` ends at its hole.",
    (
        "sampler",
        "s2d2",
    ): "Without the released bandit over when to verify. Above temperature 0 this, and what "
    "`threshold` commits, follow from the model's own probabilities, in the released code from "
    "those after temperature and filters. Of the masks of a block only the run that is judged is "
    "fed a second time. At equal S hysteresis switches on as in the released code, where the paper "
    "has >=.",
    ("sampler", "edit"): "New tokens are committed where the probability reaches the threshold, "
    "in the official code where it exceeds it. The reviser also works with other selectors.",
    (
        "sampler",
        "remdm",
    ): "The loop is counted in steps of the schedule, so that it also works "
    "with fewer steps than positions, where the official code starts at 7/8 of the block's length.",
    (
        "sampler",
        "append",
    ): "Blocks are appended as block diffusion does; on models without a causal "
    "mask the lookahead is this library's.",
    ("sampler", "random"): "Recorded orders are replayed; the draws are this library's.",
    ("sampler", "factor"): "The official scan commits the last-ranked position when it alone fails "
    "its bound: a defect (`ReleasedFactor` in the tests has it).",
    (
        "sampler",
        "eos",
    ): "`rank_last` orders positions that propose a stop id behind all others; the "
    "official code removes both ids from the softmax after the argmax, by a chained assignment.",
    ("sampler", "adablock"): "Given positions are no delimiters, and delimiters follow from the "
    "tokenizer unless they are named.",
    ("sampler", "eb"): f"{RECONSTRUCTED}: the rule follows the paper.",
    ("sampler", "multi_blocks"): f"{RECONSTRUCTED}: reconstructed for `ete`.",
    ("sampler", "ete"): "No official code and no full text were at hand: reconstructed from the "
    "abstract. On `nano` it gained nothing over its base: 775 forwards (`order=conf` 780) against "
    "787.",
    ("sampler", "eotp"): "The official variants fix one id of LLaDA's vocabulary and could not be "
    "recorded. They have no bound; `tau=0` removes it here.",
    (
        "sampler",
        "localleap",
    ): "The authors' code was not readable; a third-party copy was recorded. "
    "The abstract says 14.2 % of the steps of one token per step.",
    ("sampler", "lopa"): "`k` counts the row as it stands, the official `branching_factor` does "
    "not.",
    ("sampler", "certainty_prior"): "Alone: no official code; the rule is that of a third party.",
    ("sampler", "prophet"): "Where no selector keeps a schedule and no `steps` are given, progress "
    "is the decided share; regions other than the answer behind given text are extensions.",
    (
        "sampler",
        "r2",
    ): "The paper's 88 % fewer steps are with its fine-tuned checkpoints; the rules "
    "alone save what `docs/samplers/r2.md` measures.",
    ("sampler", "wino"): "Given positions are never taken back.",
    ("sampler", "dcd"): "Each row has its own window; the official code shares one over a batch.",
    (
        "sampler",
        "dsb",
    ): "`k_max` is the official `max_block_length`, in its scripts the block length.",
    ("cache", "dcd"): "Each row refreshes on its own count; the official code takes the average. "
    "Padding is computed once; in `ReleasedDCD` of the tests it waits for the next refresh, as do "
    "tokens that the window has left where `delay` is 0.",
    ("cache", "dsb"): "Each row refreshes on its own count.",
    ("cache", "d2"): "Each row chooses its own positions. Confidences are updated and blocks keep "
    "their length, as meant.",
    ("sampler", "wedlm"): "The official window looks past `max_new_tokens`; here the canvas ends "
    "there. Above temperature 0 the official code filters before it divides by the temperature.",
    ("sampler", "dawn"): "Given text is never overwritten; in `ReleasedDAWN` of the tests it is.",
    ("cache", "delayed"): "Where logits are shifted, the row left of what is computed is computed "
    "again and predicts its first position; `ReleasedDelayed` in the tests has the released code's "
    "shift.",
    ("cache", "d2f"): "Keeps no logits: where they are shifted, one row more is computed.",
    ("cache", "elastic"): "Could not be recorded; the rule follows paper and code.",
    ("cache", "block"): "Exact by construction: equals no cache on block-causal models (tested).",
    ("cache", "vicinity"): "Not recorded: the rule follows dInfer's code.",
    ("cache", "window_diffusion"): "Speed-ups of up to 99x are the paper's, with long canvases of "
    "8B models; `docs/reference/caches.md` has what was measured here.",
}

# Registered drafting part -> where it deviates from its paper, and how it was checked.  No official
# drafting code was recorded: exact rules are held to plain decoding, the others to their law.
DRAFTING: dict[str, str] = {
    "aded": "The published rule; the constants are this library's, and only chains are taken.",
    "cacheback": "The paper's second, frozen table of a corpus is left out (`learn` fills one "
    "before the first request); the table sizes are this library's. The released code was not at "
    "hand.",
    "dflash": "Texts and forwards equal those of transformers' own loop (tested); the formats of "
    "z-lab and of speculators are read, too. Parts of DFlash 2 are held to recordings of the "
    "official code.",
    "prompt_lookup": "The published rule; its confidence is this library's.",
    "suffix": "One history of the present text and one of the last outputs; depth and which "
    "continuations are drafted follow the paper. Running answers are shared at their end, in the "
    "official code at once: drafts of a text would depend on what runs beside it.",
    "best_first_tree": "DDTree's rule.",
    "coupled": "Shares the keyed noise of this library in place of the paper's sequence of draws.",
    "cps": "Which ends of chains win is reconstructed, as is the cut at end tokens.",
    "dyspec": "A preset of `best_first_tree`: its greedy expansion by estimated value, which with "
    "marginals does not depend on the path. Trees are judged by `keyed` in place of the paper's "
    "sampling without replacement. The released code was not compared line by line.",
    "adl": "Rounding to an integer is reconstructed; generated length is that of the raw draft.",
    "confidence_extend": "The official code drafts anew for every piece, with what it has so far "
    "as context; here one forward gives all pieces.",
    "threshold": "The token that crosses the bound and one more are sent, bound and lengths are "
    "the official code's. The paper trains a head to predict acceptance; here it is calibrated "
    "confidence.",
    "apd": "LOSSY. Log-probabilities are mixed, in the official code raw logits: the same choice. "
    "The weight is this library's.",
    "block": "Tested to be lossless in distribution.",
    "fly": "LOSSY. Constants and edges of the official code: five tokens that follow, none of the "
    "last six tokens relaxed, entropy of the three most probable tokens in nats, of raw logits; "
    "vLLM asks for six.",
    "keyed": "Equals plain decoding with the same seed token by token (tested).",
    "point": "Tested to be lossless in distribution.",
    "ratio": "Tested to be lossless in distribution.",
}

# Recipe -> arXiv id of its paper, what deviates and why.
TRAINING: dict[str, tuple[str, str]] = {
    "deer": (
        "2512.15176",
        "Stage 2 masks at most `far` = 16 tokens (96 in the paper) and stage 1 at most twice the "
        "window: answers of `nano` are short.  The end marker stands behind the masks; windows may "
        "reach beyond an answer's end, as when drafting, and nothing is learnt from there.  The "
        "paper says neither.",
    ),
    "dflash": (
        "2602.06036",
        "Weights of D-PACE (2605.18810) in place of the paper's decay (`--loss decay`), half of "
        "the target is the verifier's distribution (`--soft 0`), a sampled head, and a start from "
        "the verifier's own layers (`--init random`): what a small run needs.",
    ),
}
