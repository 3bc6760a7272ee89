"""Drafts for inference engines other than this library's: a drafter without a model, and plug-ins that use it.

Nothing is imported here: an engine may load a plug-in before compiled code may be loaded.
"""
