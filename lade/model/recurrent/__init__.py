"""Token trees through recurrent layers: linear attention, state space models, short convolutions.

A recurrent layer keeps one state a row, that of the cached text. The nodes of a tree get no states of their own: each
reads the state of the text, and its ancestors as linear attention does, under the mask that attention has, too. After
verification `keep` folds the accepted path into the state:

    state ──▶ root ─┬─ a ─── b        out(b) = decay(b) * q(b) state  +  sum over root, a, b of decay * (q k) u
                    └─ c              keep [root, a]:  state = decay(a) * state  +  sum over root, a of decay * k u

    tree_pass.py      who descends from whom in one pass
    convolution.py    cores: what the functions of transformers' mixers compute for a tree
    delta_rule.py         gated DeltaNet, and KDA with a decay for each channel
    state_space.py        Mamba 2
    selective_scan.py     Mamba 1, whose nodes have states after all
    paths.py          what decays along the paths of a tree
    cores.py          puts the cores in place of these functions for the length of a pass
    folding.py        how a path of a tree goes into a state
    layer.py          cache layers with states
"""
