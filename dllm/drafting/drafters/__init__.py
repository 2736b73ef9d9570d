"""What proposes tokens: diffusion models, lookups, and drafters made of drafters."""
