"""The algorithm: token ids and tensors only. Nothing here knows files, tokenizers or Hugging Face configs.

Letters, as in the paper and everywhere in this package:

    W  window columns          S  tokens fed in a step     V  vocabulary
    N  n-gram length           P  cached tokens of a row   B  rows of a batch
    G  guesses per step        A  tokens accepted in a step

Words, each with one meaning:

    row            one text that is decoded: prompt and output (`Row`)
    context        the tokens of a row so far, or the last few of them
    prefill        the forward pass over the prompt, which yields the first token
    step           draft, forward, verify, learn, keep, for all rows of a batch (`DecodeLoop.step`)
    token tree     all that a row feeds in a step; its root is the last token of the context (`TokenTree`)
    node           one token of a tree; its logits say what follows the path from the root to it
    window         N - 1 rows of W columns, a Jacobi iteration over the positions ahead (`Window`)
    n-gram         N tokens in a row, as a column of the window or the text spells them
    pool           for each token the G n-grams seen last that begin with it (`NGramPool`)
    guess          tokens that may follow the context, from any source
    source         what proposes guesses: the window, the pool, the memory, or a `Source`
    candidates     all nodes that a row could feed in a step, best first (`Candidates`)
    score          the probability that a node is accepted, as estimated before the forward pass
    budget         decides how many candidates are fed (`Budget`; `BatchBudget` for all rows together)
    draft          what a row does feed: a tree (`Draft`), made by a `Drafter`
    verify         walk from the root along the tokens that the model itself chooses (`walk`)
    accept         a drafted token is accepted if the model chooses it in the walk
    bonus          the last token of a step, which the model chooses after the last accepted one
    emit           append a token to its row: accepted ones and the bonus
    chooser        turns logits into a token: the argmax, or processors and a sampler (`Chooser`)
    readout        what is copied from the device in a step: argmax ids, choices, entries (`Readout`)
    entries        of a row of logits the likeliest tokens with their log-odds, `WIDTH` int32 (`kernels.layout`)
    memory         entries by context: what the model's logits were, and what followed in texts (`ContextMemory`)
    hit            a context that the memory has entries for
    evict          remove what was used least recently, to make room
    keep           leave the accepted path in the KV cache and drop the other nodes
"""
