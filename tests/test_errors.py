"""Errors go where others need them: copied, pickled, sent from a worker to its parent."""

import copy
import functools
import inspect
import multiprocessing
import pickle
import traceback

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import lade
from lade import errors

TEXTS = st.text(max_size=20)
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | st.lists(st.integers())
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {protocol}": functools.partial(pickle.dumps, protocol=protocol) for protocol in PROTOCOLS},
}


def copied(error: BaseException, way: str) -> BaseException:
    made = COPIES[way](error)
    return pickle.loads(made) if isinstance(made, bytes) else made


KINDS = [thing for thing in vars(errors).values() if inspect.isclass(thing) and issubclass(thing, BaseException)]
"""All exceptions and warnings that there are, also those that are to come."""


@st.composite
def made(draw, kind):
    """An error with arguments that its `__init__` takes, and perhaps a note."""
    arguments = []
    for parameter in list(inspect.signature(kind.__init__).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments += draw(st.lists(TEXTS, max_size=2))
        elif parameter.kind is not parameter.VAR_KEYWORD:
            arguments.append(draw(TEXTS if parameter.annotation == "str" else VALUES))
    error = kind(*arguments)
    for note in draw(st.lists(TEXTS, max_size=2)):
        error.add_note(note)
    return error


def appearance(error: BaseException) -> tuple[object, ...]:
    """All that can be seen of an error but where it was raised."""
    shown = traceback.format_exception_only(error)
    return type(error), str(error), repr(error), error.args, vars(error), getattr(error, "msg", None), shown


def test_all_errors_are_found_and_public():
    assert {getattr(lade, name) for name in lade.__all__ if name.endswith(("Error", "Warning"))} == {*KINDS}
    assert len(KINDS) > 8


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(15))
@given(data=st.data())
def test_a_copy_is_like_the_error(kind, data):
    error = data.draw(made(kind))
    for way in COPIES:
        twin = copied(error, way)
        assert twin is not error
        assert appearance(twin) == appearance(error), way
        assert appearance(copied(twin, way)) == appearance(error), way


def test_a_deep_copy_shares_nothing_and_a_shallow_one_has_attributes_of_its_own():
    error = errors.ConfigError("window", [1], "give a number")
    assert copy.copy(error).value is error.value and copy.deepcopy(error).value is not error.value
    twin = copy.copy(error)
    twin.field = "ngram"
    assert error.field == "window"


def test_a_worker_process_sends_its_error_to_the_parent():
    """Where it could not be unpickled the parent would wait for ever."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        answer = pool.apply_async(lade.LookaheadConfig, kwds={"window": -1})
        with pytest.raises(lade.ConfigError, match=r"^window=-1 is not valid: give ") as caught:
            answer.get(timeout=200)
    assert (caught.value.field, caught.value.value) == ("window", -1)
