"""Structured output: JSON schemas, regular expressions, choices and Lark grammars, by llguidance.

    grammar ──▶ compiled for a tokenizer ─┬▶ processor    masks the logits of every emitted token
                                          └▶ constraint   proposes forced tokens, and rejects invalid drafts

The constraint affects speed only: the tokens are those of `model.generate` with the processor.
"""
