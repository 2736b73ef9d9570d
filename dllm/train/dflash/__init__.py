"""Training of block-diffusion drafters (DFlash, arXiv 2602.06036)."""
