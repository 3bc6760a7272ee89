"""The tensor side: which models can be served, attention masks, the KV cache, and running the model.

facts.py             ModelFacts: what a call knows of its model, looked up once
support/             whether a model can be decoded exactly
runner.py            EagerRunner: prefill, and one forward pass over a token tree per step
prefill.py           passes over prompts; prompt_logits.py: the logits of their tokens
kv_cache.py          TreeCache: rows with lengths of their own, of which paths of trees are kept
cache_layers.py      its layers; user_cache.py: decoding from a user's own cache
inputs.py, masks.py  tensors and attention masks of a step
config.py            fields of configurations; how deep a tree may be
capture_blockers.py  hooks and wrappers that need passes of the ordinary kind
"""
