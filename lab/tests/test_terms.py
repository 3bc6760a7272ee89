"""What differs between two runs is named by its first difference."""

import pytest

from lade.errors import InputError
from lade_lab.terms import require_same

TERMS = {"settings": {"max_new_tokens": 20, "seeds": [0, 1]}, "methods": [{"name": "hf"}, {"name": "plain"}]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"settings": {"max_new_tokens": 30, "seeds": [0, 1]}}, "settings.max_new_tokens is 30 here, but 20"),
        ({"settings": {"max_new_tokens": 20, "seeds": [0, 2]}}, "settings.seeds 2 is 2 here, but 1"),
        ({"methods": [{"name": "hf"}]}, "methods is .* here, but .*plain"),
        ({"methods": [{"name": "hf"}, {"name": "x"}]}, 'methods 2.name is "x" here, but "plain"'),
        ({"methods": None}, "methods is null here, but"),
        ({"model": "new"}, 'model is "new" here, but null'),
    ],
)
def test_other_terms_are_refused_by_their_first_difference(changed, message):
    here = {name: value for name, value in {**TERMS, **changed}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        require_same(TERMS, here, "here")


def test_what_two_long_texts_have_in_common_is_not_shown():
    there, here = ({"prompt": "x" * 100 + "y" * 15 + end} for end in ("old", "new"))
    with pytest.raises(InputError) as caught:
        require_same(there, here, "line 1 of 'a'")
    common = "..." + "x" * 5 + "y" * 15
    assert f'prompt is "{common}new" here, but "{common}old" in line 1 of \'a\': resume with' in str(caught.value)
    require_same(there, dict(there), "here")
    with pytest.raises(InputError, match=r'^a is "xx" here, but "x" in'):
        require_same({"a": "x"}, {"a": "xx"}, "here")
