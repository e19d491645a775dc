"""Models with plain attention over a full-KV pool, decoded with trees of drafts: Hugging Face's, tiny."""
