"""The recipe: a folder with which transformers itself, and whatever is built on it, decodes with lookahead.

`model.generate(custom_generate=FOLDER, trust_remote_code=True)` runs `FOLDER/custom_generate/generate.py`, which is as
short as it can be, so that it can be read before it is trusted: all it does is call `lade.recipe.generate.generate`.
That function stays where it is, for recipes that were written out by an earlier version.
"""
