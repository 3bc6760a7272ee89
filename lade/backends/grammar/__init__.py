"""Grammars that answers have to follow: JSON schemas, regular expressions, choices, and Lark grammars, by llguidance.

    grammar ──▶ compiled for a tokenizer ─┬▶ processor    asked about every emitted token: what the answer may be
                                          └▶ constraint   asked about every draft: what to guess, and what not

Whatever the constraint says changes the speed alone, so the tokens are those of `model.generate` with the processor.
"""
