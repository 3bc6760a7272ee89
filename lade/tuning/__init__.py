"""What a step costs on this machine: measured once, saved, and refreshed by the steps that are taken.

    cost.py       StepCost: t(S), seconds of one forward pass that feeds S tokens, and its convex hull
    measure.py    finds it out, with real passes over dummy trees
    store.py      saved curves, one small file each, in the user's cache folder
    profile.py    the curve of a model: in use already, else saved, else measured now

The decoding layer sees nothing of this but an object with `seconds(size)`, `marginals` and `observe(size, seconds)`.
"""
