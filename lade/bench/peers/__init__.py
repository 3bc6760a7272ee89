"""Other training-free methods, after their papers, as drafters: they guess, and this library's loop verifies.

    token_recycling.py   a tree of a fixed shape, filled from the likeliest tokens that last followed each token
    suffix.py            what followed the longest ends of the text before, as likely as it was often
    prompt_lookup.py     what followed the last few tokens before, the latest first

Each feeds trees of the size that a benchmark asks for, so that tokens per step compare at equal tokens fed.
"""
