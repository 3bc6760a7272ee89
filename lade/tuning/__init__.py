"""What a step costs on this machine: measured once, saved, and refreshed by the steps that are taken.

    cost_cache.py   the curve of a model: in use already, else saved, else measured now; what a saved one depends on

The curve itself is `lade.decoding.drafting.step_cost`: t(S), seconds of one forward pass that feeds S tokens.
"""
