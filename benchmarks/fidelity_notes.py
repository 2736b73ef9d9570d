"""The reasons in docs/fidelity.md: what is not replayed to the end, and where defaults differ."""

from __future__ import annotations

RECONSTRUCTED = "No official code was at hand"

# Recorded file -> what of it deviates.
ROUTINES: dict[str, str] = {
    "daedal_llada": "With `ReleasedDaedal`: an insertion beyond the largest canvas drops its "
    "end, and an answer without an end of text stays as long as it is. Rows do not see the "
    "padding of shorter prompts.",
    "llada21_edit": "Replayed on a canvas that ends with a block, as the official one does before "
    "its text is cut.",
    "remdm_llada": "The official routine samples at temperature 1; recorded and replayed is its "
    "argmax. With fewer steps than positions it re-masks arbitrary ones: not recorded.",
    "dpad_llada": "The recorded draws replace this library's noise. Behind an end "
    "of text the official code fills to the end.",
    "dpad_dream": "As for LLaDA, and `force_first` of the tests where cached: the opening pass of "
    "a block commits exactly its first position.",
    "fastdllm_dream_cached": "Cached with `force_first`, else with a quota that caps the "
    "threshold.",
    "adablock_dream": "Cached with `force_first`.",
    "window_diffusion_dream": "With `force_first` of the tests: a refresh commits the first "
    "mask. Six cases differ in the last forward alone: its top-k takes more positions than are "
    "eligible and masks decided ones. All "
    "commits and sizes, and the text elsewhere, are compared.",
    "freedave_llada": "Not replayed: eager acceptance over several blocks, where the official "
    "code drafts from predictions made before its last commits and keeps the first draft "
    "unchecked: its text is not the base's. A draft is committed one forward earlier, so that "
    "the official canvas lies between two of ours. Its repeated drafts, and forwards that feed "
    "nothing else, are not paid for.",
    "freedave_dream": "As for LLaDA. In eager mode the official code also overwrites the first "
    "position of a block.",
    "lopa_dream": "Every branch of every round is compared. The official code keeps the logits "
    "of the row left of the open blocks, this one computes it again: the same where attention is "
    "block-causal, else replayed with `ReleasedLoPA` and `ReleasedD2F`. With nothing to try the "
    "official code feeds the row twice.",
    "dmax_spd_llada2": "DMax's training (OPUT) has no counterpart.",
    "d3llm_multi_block_dream": "With `ReleasedDelayed`: of the positions fed the first "
    "is predicted from its own row, because the slice is shifted and not the canvas.",
    "d3llm_multi_block_dream_waiting": "Two decided blocks wait at once: the official refresh "
    "keeps the first of them and does not count it, so that it is then kept twice. Compared up "
    "to there.",
    "dkv_cache_llada_greedy": "With `llada(remasking=random)`, and numbers that give the "
    "recorded order in place of noise.",
    "apd_dream": 'With `speculate(rule="apd", search="apd")`; its baseline from left to right with '
    "`threshold(tau=0)+blocks`. The official code keeps the verifier's logits of the last token, "
    "this one feeds that token again, with the draft. Nothing here is its `max_lookahead` "
    "without a verifier.",
    "dcd_llada": "With `ReleasedDCD` where cached: what the window has left and the padding "
    "behind an end of text stay as they were until the next refresh.",
    "dcd_dream": "As for LLaDA.",
    "dsb_llada": "Where cached with `ReleasedDSB` and `ReleasedDSBCache`: the official code also "
    "commits in the suffix, because its mask is cut by a position of the canvas, in an array "
    "that begins with the slice.",
    "dsb_dream": "Where cached with `ReleasedDSB` and `ReleasedDSBCache`: every full "
    "pass commits exactly the first mask, and the first position of a fed slice is predicted "
    "from its own row.",
    "dinfer_blockwise": "After an early stop the official code fills behind the block, this one "
    "behind the stop id: compared is the text.",
    "fastdllm_v1_llada_factor": "With `ReleasedFactor`: the scan also commits the last-ranked "
    "position when it alone fails its bound.",
    "wedlm_stream": "The engine feeds the prompt alone first, and what was decided last in one "
    "more forward; here the prompt goes with the first window, and what will not be read is not "
    "fed. Its window looks past `max_new_tokens`: replayed on a canvas longer by a window.",
    "wedlm_blocks": "With `threshold` or `fixed`, and `ReleasedBlocks`: the official "
    "code knows masks by their id, and one that the model proposes counts as undecided from "
    "the next block on. By default `suppress_mask` proposes none.",
    "s2d2_llada21": "With the recorded draws and, in place of refused drafts, the recorded "
    "tokens, whose support is compared. Draft and verification are one step in the released "
    "code, two here; edits come with the first, and the next forward stores a finished block.",
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
    ): "Texts equal those of the official loop; tests compare a loop of its rules. Each hole has "
    "bounds of its own, and `delete_to_right` ends at its hole.",
    (
        "sampler",
        "s2d2",
    ): "Without the released bandit over when to verify. Only judged masks are fed twice. "
    "At equal S hysteresis stays off as officially, where the paper has >=. "
    "With `resample=False` a refused draft stays, as for SDAR; for Fast-dLLM v2 it does not.",
    ("sampler", "credit"): "Recorded is dInfer's code, not its authors'.",
    ("sampler", "edit"): "New tokens are committed where the probability reaches the threshold, "
    "in the official code where it exceeds it.",
    (
        "sampler",
        "remdm",
    ): "The loop is counted in steps of the schedule, so that fewer steps than positions work. "
    "Officially it starts at 7/8 of the block's length, and a stop id in the prompt ends the "
    "answer behind its first block.",
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
    "official code removes both ids from the softmax after the argmax.",
    ("sampler", "adablock"): "Given positions are no delimiters, and delimiters follow from the "
    "tokenizer unless they are named.",
    ("sampler", "eb"): f"{RECONSTRUCTED}: the rule follows the paper.",
    ("sampler", "multi_blocks"): f"{RECONSTRUCTED}: reconstructed for `ete`.",
    ("sampler", "ete"): "Reconstructed from the abstract: no code, no full text. On `nano` it "
    "gained nothing over its base.",
    ("sampler", "eotp"): "The official variants fix one id of LLaDA's vocabulary and could not be "
    "recorded.",
    (
        "sampler",
        "localleap",
    ): "The authors' code was not readable; a third-party copy was recorded.",
    ("sampler", "lopa"): "`k` counts the row as it stands, the official `branching_factor` does "
    "not. A branch that ends the text is fed up to there.",
    ("sampler", "dmax"): "A `settled` block commits its remaining masks; the official code leaves "
    "those below a higher `threshold`.",
    ("sampler", "prophet"): "Where no selector keeps a schedule and no `steps` are given, progress "
    "is the decided share; regions other than the answer behind given text are extensions.",
    ("sampler", "dcd"): "Each row has its own window; the official code shares one over a batch. "
    "On block-causal models that also commits each block's first token alone, and `e_max` moves "
    "the attention's blocks.",
    (
        "sampler",
        "dsb",
    ): "`k_max` is the official `max_block_length`, in its scripts the block length.",
    ("cache", "dcd"): "Each row refreshes on its own count; the official code takes the average. "
    "Padding is computed once; in `ReleasedDCD` of the tests it waits for the next refresh, as do "
    "tokens that the window has left where `delay` is 0.",
    ("cache", "dsb"): "Each row refreshes on its own count.",
    (
        "sampler",
        "wedlm",
    ): "It samples at 0.2 by default, and filters before it divides by the temperature.",
    ("cache", "delayed"): "Where logits are shifted, the row left of what is computed is computed "
    "again and predicts its first position; `ReleasedDelayed` in the tests has the released code's "
    "shift.",
    ("cache", "d2f"): "Keeps no logits: where they are shifted, one row more is computed.",
    (
        "cache",
        "dllm_cache",
    ): "Recomputes what has just changed, too (`force_pending`). Where logits "
    "are shifted, the prompt's last position, which predicts the first token, belongs to the "
    "response.",
    ("cache", "elastic"): "Could not be recorded; the rule follows paper and code.",
    ("cache", "vicinity"): "Run beside dInfer's code, which refreshes twice where its warm-up "
    "ends in a later block.",
    ("cache", "window_diffusion"): "A phase ends where the active masks leave its window: the code "
    "for LLaDA goes on, that for Dream feeds all from its first mask on.",
    ("cache", "dkv"): "The code for LLaDA starts over with each block, and computes all in its "
    "second step; in that for Dream (`dkv_pd`, too) a position rests when its right neighbour is "
    "decided, even one that is a mask.",
}

# Registered drafting part -> where it deviates from its paper, and how it was checked.  No official
# drafting code was recorded: exact rules are held to plain decoding, the others to their law.
DRAFTING: dict[str, str] = {
    "cacheback": "No second, frozen table of a corpus (`learn` fills one). Checked against the "
    "drafter in pie-project/pie: one token leads two there, 256 leaders with 4 followers each, and "
    "its tree ends where they do.",
    "dflash": "Texts and forwards equal those of transformers' loop (tested). Parts of DFlash 2 "
    "and DSpark are held to recordings (SpecForge's own loop reads DSpark's rows one too far); "
    "official code walks one path, here the best prefixes are drafted.",
    "prompt_lookup": "The published rule; its confidence is this library's.",
    "suffix": "One history of the text and one of the last outputs; depth and choice follow the "
    "paper. Answers are shared at their end, officially at once: drafts would depend on what "
    "runs beside them.",
    "best_first_tree": "DDTree's rule; with `nodes=64` that of DySpec (2410.11744), whose code was "
    "not at hand.",
    "coupled": "Shares the keyed noise of this library in place of the paper's sequence of draws.",
    "cps": "Which ends of chains win is reconstructed, as is the cut at end tokens.",
    "adl": "Rounding to an integer is reconstructed; generated length is that of the raw draft.",
    "apd": "LOSSY. Log-probabilities are mixed, in the official code raw logits: the same choice. "
    "The weight is this library's.",
    "block": "Tested to be lossless in distribution. HSD (2601.05724) has its outcomes, coin for "
    "coin; its released files differ from one another.",
    "keyed": "Equals plain decoding with the same seed token by token (tested).",
    "ratio": "Tested to be lossless in distribution.",
}

# Recipe -> arXiv id of its paper, what deviates and why.
SERVED: dict[str, tuple[str, str]] = {  # modules of dllm.drafting
    "device": (
        "2506.09397",
        "SLED: its code was not at hand. A draft has a fixed length, in the paper one that follows "
        "the drafter's confidence; a device waits for each answer.",
    ),
}
TRAINING: dict[str, tuple[str, str]] = {
    "train parallel --recipe tad": (
        "2605.09536",
        "8 losses equal. A text is drawn, then a moment; the official code draws pairs uniformly, "
        "so that long runs count more.",
    ),
    "train parallel --recipe dparallel": ("2509.26488", "8 losses equal."),
    "train parallel --recipe d3llm": (
        "2601.07568",
        "8 losses equal. The complement, without entropy as published, is off, and the weight of "
        "the entropy 1, in the official settings on and 2.",
    ),
    "train deer": (
        "2512.15176",
        "Stage 2 masks at most `far` = 16 tokens (96 in the paper), stage 1 twice the window: "
        "answers of `nano` are short.  The end marker stands behind the masks; windows may reach "
        "beyond an answer, where nothing is learnt.",
    ),
    "train dflash": (
        "2602.06036",
        "Weights of D-PACE (2605.18810) in place of the paper's decay (`--loss decay`), half of "
        "the target is the verifier's distribution (`--soft 0`), a sampled head, and a start from "
        "the verifier's own layers (`--init random`): what a small run needs.",
    ),
}
