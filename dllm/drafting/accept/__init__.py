"""Which tokens of a draft stand: rules for chains and trees, and what they see of the verifier."""
