"""Every cache twice: with settings that bite on a short canvas, and with exact ones."""

from __future__ import annotations

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
    "sparse": "sparse",
    "d2": "d2(k=4)",
    "elastic": "elastic(beta=4)",
    "block": "block",
}
# dKV's PD never recomputes the prompt: no setting is exact.  "block" is always exact, on models
# of its own (test_block_causal.py).
EXACT = (
    "prefix(refresh_every=1)", "dual(refresh_every=1)", "dkv(refresh_every=1)",
    "dkv_prefill(refresh_every=1)", "dkv_greedy(refresh_every=1)",
    "window_diffusion(refresh_every=1)", "dllm_cache(1, 1)",
    "dllm_cache(prompt_every=1, response_every=1000, ratio=1.0)",
    "dsb(before=1000, after=1000)", "dcd(delay=1000, mode=prefix)",
    "vicinity(before=1000, after=1000)", "sparse(refresh_every=1)", "d2(k=1000, p=1.0)",
    "elastic(refresh_every=1)",
)  # fmt: skip
