"""Token trees through recurrent layers: linear attention, state space models, short convolutions.

A recurrent layer keeps one state per row, that of the cached text. The nodes of a tree get no states of their own: each
reads the state of the text, and its ancestors as in linear attention, under the same mask as attention. After
verification, `keep` folds the accepted path into the state:

    state ──▶ root ─┬─ a ─── b        out(b) = decay(b) * q(b) state  +  sum over root, a, b of decay * (q k) u
                    └─ c              keep [root, a]:  state = decay(a) * state  +  sum over root, a of decay * k u

    layer.py          cache layers with states; ancestry, convolutions, decays along paths, folding of a path
    backend.py        gated DeltaNet and KDA, Mamba 1, Mamba 2, replacing the functions of transformers' mixers; trees
                      kept over several passes
"""
