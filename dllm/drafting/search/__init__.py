"""From the distributions of a drafter to a draft: a chain or a tree of tokens."""
