"""Model families and the loader."""
