"""Every cache with settings that bite on a short canvas, and with exact ones; every sampler."""

import dllm

SMALL = {
    "none": "none",
    "prefix": "prefix",
    "dual": "dual",
    "dkv": "dkv(refresh_every=4)",
    "dkv_prefill": "dkv_prefill",
    "dkv_pd": "dkv_pd(refresh_every=3)",
    "dkv_greedy": "dkv_greedy(refresh_every=3, window=2)",
    "window_diffusion": "window_diffusion(refresh_every=4, active=4, window=10)",
    "window_diffusion, far": "window_diffusion(refresh_every=4, active=4, window=10, far=False)",
    "dllm_cache": "dllm_cache(6, 3)",
    "dsb": "dsb(refresh_after=5, before=3)",
    "dcd": "dcd(refresh_after=5)",
    "vicinity": "vicinity(before=2, after=2, warmup=1)",
    "dpad": "dpad(window=6, sigma=2)",
    "elastic": "elastic(beta=4)",
    "delayed": "delayed(refresh_every=3)",
    "d2f": "d2f",
    "block": "block",
    "wedlm": "wedlm",
}
# Always exact, on models of their own (test_block_causal.py, test_decided_first.py).
OWN_MODELS = {"block": {"block_length": 4}, "wedlm": {"mask_kind": "decided_first"}}
# dKV's PD never recomputes the prompt: no setting is exact.
EXACT = (
    "prefix(refresh_every=1)", "dual(refresh_every=1)", "dkv(refresh_every=1)",
    "dkv_prefill(refresh_every=1)", "dkv_greedy(refresh_every=1)",
    "window_diffusion(refresh_every=1)", "dllm_cache(1, 1)",
    "dllm_cache(prompt_every=1, response_every=1000, ratio=1.0)",
    "dsb(before=1000, after=1000)", "dcd(refresh_every=1)",
    "vicinity(before=1000, after=1000)", "elastic(refresh_every=1)", "delayed(delay=1000)",
    "dpad(base=none, scale=9, window=100000)", "dpad(dropout=uniform, number=999, refresh_every=1)",
)  # fmt: skip

# How samplers are called where their bare name would do little on a short canvas of a random
# network; every other registered one is called by its name (`every_sampler`).
BITES = {
    "adablock": "adablock(4, delimiters=(3, 7))+threshold(0.8)",
    "blocks": "threshold(0.8)+blocks(4)",
    "credit": "credit+threshold(0.8)",
    "d2f": "d2f(0.5)+staged_blocks(4)",
    "d3llm": "d3llm(0.7)",
    "dcd": "dcd(s_init=4)+threshold(0.8)",
    "dparallel": "dparallel(0.7)",
    "dsb": "dsb(4)+threshold(0.8)",
    "eb": "eb(gamma=1)",
    "edit": "edit(tau=0.3)+threshold(0.5)",
    "eos": "eos(eos_policy=block_contains)+threshold(0.8)",
    "eotp": "eotp(0.2)+threshold(0.8)",
    "ete": "ete(k=3, tau=0.8)+multi_blocks(8)",
    "factor": "factor(2)",
    "freedave": "freedave(draft_depth=3)",
    "hierarchical": "hierarchical(0.8, 0.4)",
    "localleap": "localleap(0.9, 0.75)",
    "lopa": "lopa(k=3)",
    "margin": "margin+fixed",
    "multi_blocks": "multi_blocks(4)+threshold(0.8)",
    "neg_entropy": "neg_entropy+fixed(2)",
    "prob": "prob+fixed(2)",
    "prophet": "prophet(early=9, mid=7, late=6)+threshold(0.8)",
    "r2": "r2(spatial_threshold=0.8, temporal_threshold=0.7)+threshold(0.8)",
    "random": "random+fixed(2)",
    "remdm": "remdm(n=2, start=0.5)+blocks(6)",
    "remdm_quota": "remdm_quota(start=0.5)",
    "s2d2": "s2d2(policy=span)+threshold(0.8)+blocks(4)",
    "staged_blocks": "staged_blocks(4)+threshold(0.8)",
    "threshold": "threshold(0.8)",
    "wedlm": "wedlm(1.0)+dcd(4, 4)",
    "whole": "whole+threshold(0.8)",
}
MODES = (
    "lopa(d2f(0.5), k=3)+staged_blocks(4)",
    "llada(remasking=random)", "dream(alg=origin)", "dream(alg=topk_margin)",
    "dream(alg=maskgit_plus, alg_temp=0.5)", "dream(alg=entropy)+blocks(8)",
)  # fmt: skip


def every_sampler() -> list[str]:
    """A composition for each registered sampler part, and modes of some."""
    # Rules of length are asked for by ``length=`` and have tests of their own.
    names = [info.name for info in dllm.samplers.available() if info.role != "length"]
    return [*(BITES.get(name, name) for name in names), *MODES]
