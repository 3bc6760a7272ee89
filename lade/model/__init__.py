"""The tensor side: which models can be served, attention masks, the KV cache, and running the model.

What every run needs lies in this folder itself:

    runner.py          EagerRunner: prefill, and one forward pass over a token tree per step
    kv_cache.py        TreeCache: rows with lengths of their own, of which paths of trees are kept
    user_cache.py      decoding from a user's own cache
    masks.py           attention masks of a tree step; position_limits.py: how deep a tree may be
    inference_mode.py  in which mode passes are made, and for which models in another
    select_runner.py   which runner serves a model: the only file that imports `cuda_graphs`

Apart from that:

    support/           whether a model can be decoded exactly
    packing/           prepacked linear layers for the CPU
    tree_attention/    the attention implementation `lade_tree`
    invariant/         models whose rows round alike in every pass
    invariant_attention/ the attention implementation `lade_invariant`
    kernels/           what these have compiled; worker_threads.py: threads that share its work
    recurrent/         trees through recurrent layers: cores, states, cache layers
    cuda_graphs/       GraphRunner: the same interface, by captured passes on static caches
"""
