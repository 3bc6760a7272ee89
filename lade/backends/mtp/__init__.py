"""The multi-token prediction layers that checkpoints come with: found, loaded, and run beside the model.

load        looks for them in a checkpoint's files, says what they take, and has transformers' `MtpModel` read them
backend     runs the layer with a cache of its own, behind `lade.decoding.mtp.MtpLayer`
"""
