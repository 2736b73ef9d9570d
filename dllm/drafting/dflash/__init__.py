"""Block-diffusion drafters that read the verifier's hidden states (DFlash, arXiv 2602.06036)."""
