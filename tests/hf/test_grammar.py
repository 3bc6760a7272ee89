"""`grammar=` everywhere that takes one: the tokens of `model.generate` with its processor, in fewer steps."""

import json
import re

import jsonschema
import pytest
import torch
from pretend import without
from schemas import CITY, PERSON, SCHEMAS, closed
from shell_fixtures import byte_tokenizer
from spies import watched
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import lade
from lade import Grammar, InputError, LookaheadConfig, MissingExtraError, Stats
from lade.backends.grammar.compiled import vocabulary_of_tokenizer
from lade.decoding.drafting.step_cost import StepCost
from lade.embedded import model_path
from lade.hf.batch_rules import needs_lock_step
from lade.testing import toy_model

TOKENIZER = AutoTokenizer.from_pretrained(model_path())
END, NEW = TOKENIZER.eos_token_id, 64
BUDGET, PAPER = LookaheadConfig(budget=16), LookaheadConfig(3, 5, 4)


def toy(family, dtype=torch.float64):
    model = toy_model(family, vocabulary=4096, dtype=dtype)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, 0
    return model


MODELS = {"llama": toy("llama"), "gpt2": toy("gpt2"), "qwen3": toy("qwen3", torch.float32)}
MODEL = MODELS["llama"]
PROMPT = torch.tensor([TOKENIZER("His name and the town")["input_ids"]])
PROMPTS = PROMPT.repeat(3, 1) + torch.tensor([[0], [1], [2]])
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 0}
CHOICE = Grammar.choice(["yes", 'no, "never"', "peut-être\n", "yes, it is"])
GRAMMARS = [
    Grammar.json_schema(PERSON),
    Grammar.json_object(whitespace=True),
    Grammar.regex("(ab|c)+-[0-9]{3}"),
    CHOICE,
    Grammar.lark('start: "(" inner ")"\ninner: /[a-z]+/ | start'),
]


def plainly(grammar, ids=PROMPT, model=MODEL, seed=0, processors=(), tokenizer=TOKENIZER, **arguments):
    torch.manual_seed(seed)
    ends = [arguments["eos_token_id"]] if "eos_token_id" in arguments else []
    own = [*processors, grammar.processor(tokenizer, *ends)]
    return model.generate(ids, logits_processor=own, **{"max_new_tokens": NEW, **arguments})


def guided(grammar, ids=PROMPT, model=MODEL, seed=0, processors=(), tokenizer=TOKENIZER, **arguments):
    torch.manual_seed(seed)
    arguments = {"max_new_tokens": NEW, "lookahead": BUDGET, "logits_processor": list(processors), **arguments}
    return lade.generate(model, ids, grammar=grammar, tokenizer=tokenizer, **arguments)


def written(ids, prompt=PROMPT):
    """The text of the answer, and whether it has come to its end."""
    new = ids[0, prompt.shape[1] :].tolist()
    return TOKENIZER.decode(new, skip_special_tokens=True), new[-1] == END


@pytest.mark.one_in(10)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_schemas_are_followed_token_for_token(number, sampling):
    schema, model = SCHEMAS[number], MODELS[sorted(MODELS)[number % 3]]
    ours = guided(Grammar.json_schema(schema), model=model, seed=number, **sampling)
    assert torch.equal(ours, plainly(Grammar.json_schema(schema), model=model, seed=number, **sampling))
    text, ended = written(ours)
    assert ended, text
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("lookahead", [BUDGET, PAPER], ids=["adaptive", "paper"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("grammar", GRAMMARS, ids=["schema", "object", "regex", "choice", "lark"])
def test_all_kinds_of_grammars_are_followed(grammar, sampling, lookahead):
    for seed, ids in ((1, PROMPT), (2, PROMPT[:, -1:])):
        more = {"ids": ids, "seed": seed, "max_new_tokens": 30, **sampling}
        assert torch.equal(guided(grammar, lookahead=lookahead, **more), plainly(grammar, **more))


def test_what_the_grammar_forces_is_fed_as_a_chain_and_never_in_vain():
    stats, own = Stats(), {"grammar": GRAMMARS[0], "tokenizer": TOKENIZER}
    steps = list(lade.stream(MODEL, PROMPT, **own, max_new_tokens=NEW, lookahead=BUDGET, stats=stats))
    assert stats.tokens_per_step >= 2.5
    said = [token for step in steps for token in step.tokens]
    assert [*PROMPT[0].tolist(), *said] == plainly(GRAMMARS[0])[0].tolist()
    forced = [step for step in steps if "grammar" in step.sources]
    assert sum(step.sources.count("grammar") for step in forced) > len(steps)
    assert all(step.sources.index("grammar") == 0 for step in forced)


class Fixed(LogitsProcessor):
    """Makes a model say what it is told to, as far as a grammar allows it."""

    def __init__(self, wanted):
        self.wanted = wanted

    def __call__(self, input_ids, scores):
        place = input_ids.shape[1] - PROMPT.shape[1]
        return scores.index_fill(1, torch.tensor([self.wanted[place % len(self.wanted)]]), 50.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lookahead", [BUDGET, PAPER, "auto", None])
def test_it_stands_behind_the_callers_own_processors(lookahead):
    own = [Fixed(TOKENIZER('{"name":"T', add_special_tokens=False)["input_ids"])]
    more = {"processors": own, "repetition_penalty": 1.2}
    assert torch.equal(guided(GRAMMARS[0], lookahead=lookahead, **more), plainly(GRAMMARS[0], **more))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "seeded"])
def test_each_row_of_a_batch_has_its_own_grammar_or_all_the_same(sampling):
    own = [Grammar.json_schema(SCHEMAS[number]) for number in (0, 7, 27)]
    padded = torch.cat([torch.zeros(3, 2, dtype=torch.long), PROMPTS], dim=1)
    padded[0, :2] = 5
    mask = (padded != 0).long()
    for grammar in (own, own[0]):
        several = own if grammar is own else [grammar] * 3
        ours = guided(grammar, padded, attention_mask=mask, **sampling)
        ends = padded.shape[1]
        if not sampling:  # else rows draw from one generator
            for row, each in enumerate(several):
                kept = padded[row : row + 1][:, mask[row].bool()]
                alone = plainly(each, kept)[0, kept.shape[1] :].tolist()
                assert ours[row, ends : ends + len(alone)].tolist() == alone
        assert torch.equal(ours, guided(grammar, padded, attention_mask=mask, lookahead=None, **sampling))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "more",
    [
        {"num_return_sequences": 3, **SAMPLED},
        {"num_beams": 3, "max_new_tokens": 20, "lookahead": PAPER},
        {"output_scores": True, "return_dict_in_generate": True},
        {"processors": [Fixed([90, 7])], "ids": PROMPTS},
    ],
    ids=["several answers", "beams", "scores", "lock-step"],
)
def test_answers_beams_scores_and_lock_step(more):
    ours = guided(GRAMMARS[0], **more)
    plain = plainly(GRAMMARS[0], **{name: value for name, value in more.items() if name != "lookahead"})
    if isinstance(plain, torch.Tensor):
        assert torch.equal(ours, plain)
    else:
        assert torch.equal(ours.sequences, plain.sequences)
        torch.testing.assert_close(ours.scores, plain.scores)


def test_a_processor_serves_callables_and_enabled_models_with_forced_drafts_and_one_answer_after_the_other():
    plain, stats = plainly(GRAMMARS[0]), Stats()
    processor = GRAMMARS[0].processor(TOKENIZER)
    more = {"max_new_tokens": NEW, "logits_processor": [processor]}
    for _ in range(2):
        assert torch.equal(MODEL.generate(PROMPT, **more), plain)  # it notices that another answer begins
    longer = torch.cat([PROMPT, plain[:, -1:]], dim=1)
    assert torch.equal(MODEL.generate(longer, **more), plainly(GRAMMARS[0], longer))
    ours = MODEL.generate(PROMPT, custom_generate=lade.decode, lookahead=BUDGET, stats=stats, **more)
    assert torch.equal(ours, plain) and stats.tokens_per_step >= 2.5
    model = lade.enable(toy("llama"), BUDGET)
    assert torch.equal(model.generate(PROMPT, **more), plain)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=NEW, grammar=GRAMMARS[0], tokenizer=TOKENIZER), plain)


def test_rows_of_an_engine_come_and_go_each_with_its_grammar():
    with lade.Engine(MODEL, max_rows=2, max_tokens=300) as engine:
        handles = []
        for number, schema in enumerate([PERSON, SCHEMAS[7], None, PERSON, CITY, SCHEMAS[11]]):
            sampling = SAMPLED if number % 2 else {"do_sample": False}
            own = {} if schema is None else {"grammar": Grammar.json_schema(schema), "tokenizer": TOKENIZER}
            shared = {"max_new_tokens": NEW, "lookahead": BUDGET, **sampling}
            handle = engine.add(PROMPT + number % 3, seed=number, **own, **shared)
            handles.append((handle, number, schema, sampling))
        for handle, number, schema, sampling in handles:
            torch.manual_seed(number)
            processors = [] if schema is None else [Grammar.json_schema(schema).processor(TOKENIZER)]
            arguments = {"max_new_tokens": NEW, "logits_processor": processors, **sampling}
            assert torch.equal(handle.result(60), MODEL.generate(PROMPT + number % 3, **arguments))
        assert handles[0][0].stats.tokens_per_step >= 2 and handles[0][0].reason == "eos"


def test_one_processor_given_to_several_requests_is_not_shared_and_rows_need_not_wait_for_each_other():
    processor, plain = GRAMMARS[0].processor(TOKENIZER), plainly(GRAMMARS[0])
    processors, config = LogitsProcessorList([processor]), MODEL.generation_config
    assert not needs_lock_step(processors, StoppingCriteriaList(), config, streamed=False)
    with lade.Engine(MODEL) as engine:
        handles = [engine.add(PROMPT, max_new_tokens=NEW, logits_processor=[processor]) for _ in range(3)]
        assert all(torch.equal(handle.result(60), plain) for handle in handles)


def test_an_end_in_several_ways_is_the_grammars_end_only_where_it_is_complete():
    grammar = Grammar.regex("[0-9]{3}")
    for end in (END, [END, 2], None):
        more = {"eos_token_id": end, "max_new_tokens": 8}
        ours = guided(grammar, **more)
        assert torch.equal(ours, plainly(grammar, **more))
        new = ours[0, PROMPT.shape[1] :].tolist()
        rest = new[next(place for place, token in enumerate(new) if token in (END, 2)) :]
        assert re.fullmatch("[0-9]{3}", TOKENIZER.decode(new, skip_special_tokens=True))
        assert len(rest) == 1 or (end is None and set(rest) == {END})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.json_schema({"type": "strin"}), "Invalid type: strin"),
        (lambda: Grammar.json_schema({"not": {}}), "Unimplemented keys"),
        (lambda: Grammar.json_schema("{"), "schema cannot be used"),
        (lambda: Grammar.json_schema(3), "schema cannot be used"),
        (lambda: Grammar.json_schema({"$ref": "#"}), "cannot be used"),
        (lambda: Grammar.json_schema({"$ref": "http://example.org/x"}), "Resource"),
        (lambda: Grammar.regex("(?=a)b"), "look-ahead"),
        (lambda: Grammar.regex(3), "pattern=3"),
        (lambda: Grammar.lark("start: other"), "cannot be used"),
        (lambda: Grammar.choice([]), "choice="),
        (lambda: Grammar.choice("yes"), "choice='yes'"),
        (lambda: "a text", "grammar='a text'"),
        (lambda: [], "grammar="),
        (lambda: [CHOICE, CHOICE], "2 grammars for 1 prompts"),
    ],
)
def test_what_is_no_grammar_is_refused_before_anything_is_decoded(make, says):
    with pytest.raises(InputError, match=says):
        guided(make())


def test_without_what_it_needs_it_says_so(monkeypatch):
    with pytest.raises(InputError, match="tokenizer="):
        lade.generate(MODEL, PROMPT, grammar=CHOICE)
    with pytest.raises(InputError, match="another processor forbids"):
        guided(Grammar.regex("[0-9]{2}"), min_new_tokens=20)
    without(monkeypatch, "llguidance", "llguidance.hf")
    with pytest.raises(MissingExtraError, match=re.escape("pip install '.[grammar]'")):
        Grammar.json_object()


def test_pydantic_models_and_json_are_schemas_too():
    from pydantic import BaseModel

    class Pet(BaseModel):
        name: str
        legs: int

    schema = closed(a=CITY)
    assert Grammar.json_schema(json.dumps(schema)) == Grammar.json_schema(schema)
    assert '"legs"' in Grammar.json_schema(Pet).source


def test_that_names_of_members_are_texts_need_not_be_said():
    names = {"propertyNames": {"type": "string"}}
    record = {"type": "object", "additionalProperties": {"type": "integer"}}
    noted = {"type": "object", "properties": {"a": {"anyOf": [{**record, **names}]}, "b": {"const": names}}, **names}
    bare = {"type": "object", "properties": {"a": {"anyOf": [record]}, "b": {"const": names}}}
    assert Grammar.json_schema(noted) == Grammar.json_schema(bare)
    vocabulary = vocabulary_of_tokenizer(TOKENIZER)
    with pytest.raises(InputError, match="propertyNames"):
        vocabulary.compiled(Grammar.json_schema({**record, "propertyNames": {"pattern": "^a"}}).source)


FEW = PROMPT % 250


OF_ADDED_TOKENS = {
    "regex": (Grammar.regex("<think>[a-z ]{2,8}</think>[0-9]{1,3}"), "<think>[a-z ]{2,8}</think>[0-9]{1,3}"),
    "lark": (Grammar.lark('start: "<think>" /[a-z]{2}/ "</think>"'), "<think>[a-z]{2}</think>"),
    "choice": (Grammar.choice(["<think>ab</think>", "<think>ba</think>"]), "<think>(ab|ba)</think>"),
    "constant": (Grammar.json_schema({"const": "a<think>b"}), '"a<think>b"'),
    "pattern": (Grammar.json_schema({"type": "string", "pattern": "^<think>[a-z]{2}$"}), '"<think>[a-z]{2}"'),
    "name": (Grammar.json_schema(closed(**{"<think>": {"type": "null"}})), '{"<think>": ?null}'),
    "end": (Grammar.json_schema(closed(tag={"const": "</s>é</s>"})), '{"tag": ?"</s>é</s>"}'),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", OF_ADDED_TOKENS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("more", [{}, SAMPLED], ids=["greedy", "seeded"])
def test_the_text_of_an_added_token_is_a_text_like_any_other(kind, special, more):
    """llguidance spells what it forces by the token, which it then refuses."""
    grammar, pattern = OF_ADDED_TOKENS[kind]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    model = toy_model("llama", vocabulary=len(tokenizer))
    stats, own = Stats(), {"ids": FEW, "model": model, "tokenizer": tokenizer, "seed": 1}
    own |= {"max_new_tokens": 60, "eos_token_id": 0, "pad_token_id": 0, **more}
    plain = plainly(grammar, **own)
    assert torch.equal(guided(grammar, stats=stats, **own), plain)
    answer = plain[0, FEW.shape[1] :].tolist()
    assert re.fullmatch(pattern, tokenizer.decode(answer[: answer.index(0)]))
    assert stats.tokens_per_step > 1.5  # what is forced is drafted in ordinary tokens


@pytest.mark.parametrize("more", [{}, SAMPLED], ids=["greedy", "seeded"])
def test_ordinary_ends_do_not_cut_an_answer(more):
    tokenizer = byte_tokenizer()
    grammar = Grammar.json_schema(closed(k={"type": "string", "maxLength": 30}))
    model = toy_model("llama", vocabulary=len(tokenizer))
    own = {"ids": FEW, "model": model, "tokenizer": tokenizer, "seed": 1, "max_new_tokens": 90, "pad_token_id": 0}
    for letters in "}", "abcdefghABCDEFGH01234567":
        ends = [0, *tokenizer.convert_tokens_to_ids(list(letters))]
        plain = plainly(grammar, eos_token_id=ends, **own, **more)
        assert torch.equal(guided(grammar, eos_token_id=ends, **own, **more), plain)
        assert json.loads(tokenizer.decode([token for token in plain[0, FEW.shape[1] :].tolist() if token]))
    with pytest.raises(InputError, match="leave ordinary tokens out of eos_token_id"):  # in the name of the member
        guided(grammar, eos_token_id=tokenizer.convert_tokens_to_ids(["</s>", "k"]), **own, **more)


def test_what_is_learned_from_one_kind_of_text_is_not_used_for_another(monkeypatch):
    """Answers by a grammar, predicted ones and those with a memory accept more than others; sampled ones less."""
    kinds = watched(monkeypatch, StepCost, "state", lambda cost, kind: kind)
    calls = [
        {},
        SAMPLED,
        {**SAMPLED, "temperature": 0.3},
        {"grammar": CHOICE, "tokenizer": TOKENIZER},
        {"prediction": PROMPT[0].tolist()},
        {"lookahead": LookaheadConfig(memory=lade.Memory())},
    ]
    for call in calls * 2:
        lade.generate(MODEL, PROMPT, max_new_tokens=3, **call)
    assert kinds[: len(calls)] == kinds[len(calls) :] and len(set(kinds)) == len(calls)
