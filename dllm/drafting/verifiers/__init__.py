"""The autoregressive side: texts being written, and how drafts are scored."""
