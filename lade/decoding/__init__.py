"""The algorithm, on token ids and tensors alone: no files, tokenizers or Hugging Face configs.

Letters, as in the paper and throughout this package:

    W  window columns          S  tokens fed in a step     V  vocabulary size
    N  n-gram length           P  cached tokens of a row   B  rows of a batch
    G  guesses per step        A  tokens accepted in a step

Glossary:

    row            one text being decoded: prompt and output (`Row`)
    context        the tokens of a row so far, or the last few of them
    prefill        the forward pass over the prompt, which yields the first token
    step           draft, forward, verify, learn, keep, for all rows of a batch (`DecodeLoop.step`)
    token tree     all tokens that a row feeds in a step; its root is the last token of the context (`TokenTree`)
    node           one token of a tree; its logits predict the token after the path from the root to it
    window         N - 1 rows of W columns, a Jacobi iteration over the positions ahead (`Window`)
    n-gram         N consecutive tokens, from a column of the window or from the text
    pool           the G most recent n-grams for each first token (`NGramPool`)
    guess          tokens that may follow the context, from any source
    source         a producer of guesses: the window, the pool, the memory, or a `Source`
    candidates     all nodes that a row could feed in a step, best first (`Candidates`)
    score          estimated probability that a node is accepted, before the forward pass
    budget         decides how many candidates are fed (`Controller`, for all rows together)
    draft          the tree that a row feeds (`Draft`), made by a `Drafter`
    verify         walk from the root along the tokens that the model itself chooses (`walk`)
    accept         a drafted token is accepted if the model chooses it during the walk
    bonus          the last token of a step, which the model chooses after the last accepted one
    emit           append a token to its row: accepted ones and the bonus
    chooser        turns logits into a token: the argmax, or processors and a sampler (`Chooser`)
    readout        the data copied from the device in a step: argmax ids, choices, entries (`Readout`)
    entries        the top-k tokens of a row of logits with their log-odds, `WIDTH` int32 (`kernels.layout`)
    memory         entries by context: past logits of the model, and continuations seen in texts (`ContextMemory`)
    hit            a context that the memory has entries for
    evict          remove the least recently used, to free space
    keep           leave the accepted path in the KV cache and drop the other nodes
"""
