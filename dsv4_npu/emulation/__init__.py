"""Hugging Face's DeepSeek-V4 over the pools: the engine loop, drafters, the oracle and the ``run`` command.

The only room that imports transformers, and only when a model is built.
"""
