"""Notes: what the model said at the places ahead is proposed there again, whatever stands before."""

from memories import rows_of
from reference.tree import Tree

from lade.decoding.kernels.layout import NOTE_KINDS
from lade.decoding.kernels.native_tree import NativeTree
from lade.decoding.tree import ROOT, TokenTree
from lade.memory import Memory

TEXT = [1, 2, 3]
SURE = 250


def step(growth: NativeTree, memory: Memory, text: list[int], branch: list[int], said: list[int]) -> None:
    """Feed a branch below the end of a text, at whose nodes, the root first, the model says these tokens."""
    tree = TokenTree(text[-1])
    growth.start(text)
    tree.add_path(branch, "pool")
    growth.extend(tree, 1)
    memory.learn_tree(growth, rows_of([{token: SURE} for token in said]), [ROOT], said[:1])


def proposed(growth: NativeTree, memory: Memory, text: list[int]) -> list[list[int]]:
    """The paths of the likeliest nodes."""
    return [list(path) for path in growth.paths(len(growth.grow(memory.bound, text, [(4, 0.0)])))[1:]]


def test_what_was_said_at_a_rejected_token_is_proposed_at_its_place():
    growth = NativeTree()
    step(growth, Memory(), TEXT, [7], [8, 9])  # 7 was guessed, 8 was right; behind 7 the model said 9
    assert proposed(growth, Memory(), [*TEXT, 8]) == [[9]]
    assert proposed(NativeTree(), Memory(), [*TEXT, 8]) == []
    assert proposed(growth, Memory(), [*TEXT, 8, 5]) == [], "another place"


def test_what_was_said_at_the_same_token_there_counts_for_more():
    growth = NativeTree()
    step(growth, Memory(), TEXT, [7, 4], [8, 5, 6])
    step(growth, Memory(), TEXT, [8, 4], [8, 9, 6])
    step(growth, Memory(), TEXT, [7, 4], [8, 5, 6])
    assert proposed(growth, Memory(), [*TEXT, 8])[0] == [9]
    assert proposed(growth, Memory(), [*TEXT, 7])[0] == [5]


def test_how_far_notes_are_to_be_trusted_is_learned():
    growth, memory = NativeTree(), Memory()
    for end in range(60):
        step(growth, Memory(), [*TEXT, *[50] * end], [7], [8, 9])
        step(growth, memory, [*TEXT, *[50] * end, 8], [], [end])  # never what the note said
    learned, prior = Tree(growth).note_weights, Tree(NativeTree()).note_weights
    assert (learned[1:, NOTE_KINDS] < prior[1:, NOTE_KINDS]).any()
    assert (learned[0] == 0.0).all()
