"""The multi-token prediction layers that checkpoints come with: found, loaded, and run beside the model.

load        looks for them in a checkpoint's files, says what they take, and has transformers' `MtpModel` read them
prompts     keeps the model's states of prompts until their rows draft
head        predictions of the layer's outputs: the whole language model head, or some of its rows
backend     runs the layer with a cache of its own, behind `lade.decoding.mtp.MtpLayer`
"""
