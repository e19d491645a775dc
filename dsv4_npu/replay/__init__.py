"""Replay of a request trace through the allocator, and the HTML report. Host only: no payload tensors."""
