"""Thirty JSON schemas, all of whose texts end soon."""

WORD = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
CITY = {"enum": ["Paris", "London", "Rome"]}


def closed(required=None, **members):
    """An object with these members and no others."""
    names = list(members) if required is None else required
    return {"type": "object", "properties": members, "required": names, "additionalProperties": False}


PERSON = closed(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}, happy={"type": "boolean"}, city=CITY)
"""The one by which tokens per step are told."""

SCHEMAS = [
    PERSON,
    closed(a=WORD),
    closed(only=CITY),
    closed(required=[], maybe=DIGIT, perhaps={"type": "boolean"}),
    closed(required=["second"], first=WORD, second=DIGIT),
    closed(outer=closed(inner=closed(deep={"type": "boolean"}))),
    closed(left=closed(x=DIGIT, y=DIGIT), right=closed(x=DIGIT, y=DIGIT)),
    closed(items={"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4}),
    closed(items={"type": "array", "items": closed(id=DIGIT), "maxItems": 2}),
    closed(pair={"type": "array", "prefixItems": [WORD, DIGIT], "items": False, "minItems": 2}),
    closed(none={"type": "null"}, flag={"type": "boolean"}),
    closed(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    closed(day={"type": "string", "format": "date"}),
    closed(address={"type": "string", "format": "ipv4"}),
    closed(id={"type": "string", "format": "uuid"}),
    closed(kind={"const": "fixed"}, version={"const": 2}),
    closed(level={"type": "integer", "enum": [1, 10, 100]}),
    closed(mixed={"enum": ["a", 1, None, True]}),
    closed(value={"anyOf": [DIGIT, {"type": "boolean"}]}),
    closed(value={"anyOf": [closed(kind={"const": "a"}, n=DIGIT), closed(kind={"const": "b"}, s=WORD)]}),
    closed(value={"type": ["boolean", "null"]}),
    closed(share={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}),
    closed(even={"type": "integer", "multipleOf": 2, "minimum": 10, "maximum": 98}),
    closed(short={"type": "string", "minLength": 2, "maxLength": 3}),
    {"$defs": {"point": closed(x=DIGIT, y=DIGIT)}, **closed(at={"$ref": "#/$defs/point"})},
    closed(a=WORD) | {"title": "Named", "description": "With words about it.", "$comment": "none"},
    {"type": "array", "items": CITY, "minItems": 1, "maxItems": 3},
    {"type": "string", "enum": ["yes", "no"]},
    {"type": "boolean"},
    {"allOf": [closed(a=DIGIT, b=DIGIT)]},
]
