"""Models whose rows round alike whatever else is in a pass: layers, experts, and the trials of both.

padded_rows.py       layers that never get a lone row
experts.py           the same of mixtures of experts
row_trial.py         how many rows a layer needs
attention_trial.py   whether attention keeps its order of summation
model_trial.py       a whole model, a tree against single tokens
make_invariant.py    `lade.invariant` and `lade.variant`
"""
