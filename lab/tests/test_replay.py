"""The text of single tokens."""

import pytest

from lade_lab.harness.experiment import pieces_of


class Bytes:
    """One token a byte; a line does not begin with a space, as with many a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return bytes(ids).decode("utf-8", errors="replace").removeprefix(" ")


@pytest.mark.parametrize(
    ("prompt", "answer", "pieces"),
    [
        (b"ab", b" cd", [" ", "c", "d"]),
        (b"", b" cd", ["", "c", "d"]),
        (b"a", "é!".encode(), ["", "é", "!"]),
        (b"a", "x😀y".encode(), ["x", "", "", "", "😀", "y"]),
        (b"a" * 30, b"bc", ["b", "c"]),
        (b"a", "é".encode()[:1], ["\ufffd"]),
        (b"a", b"", []),
    ],
)
def test_pieces_are_what_each_token_adds(prompt, answer, pieces):
    found = pieces_of(list(answer), list(prompt), Bytes())
    assert found == pieces
    assert prompt.decode() + "".join(found) == (prompt + answer).decode(errors="replace") or not prompt
