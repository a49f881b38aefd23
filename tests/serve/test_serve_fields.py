"""Fields of requests: what is read, what is refused and in which words, and their description."""

import pytest

from jpeg_dlm.serve.fields import read, rules
from jpeg_dlm.serve.http_errors import ApiError
from jpeg_dlm.serve.openapi import POSTS, description
from jpeg_dlm.serve.requests import Completion, EmbeddingRequest, Interpolation


def test_a_request_is_read():
    found = read(Completion, {"prompt": "A dog", "n": 3, "seed": 7.0, "stop": ["a", "b"], "w": 2, "stream": None, "user": "me"})
    assert found == Completion(prompt=("A dog",), n=3, seed=7, stop=("a", "b"), w=2.0)
    assert found.options() == {"w": 2.0} and read(Completion, {}) == Completion()


NOTHING = {
    "temperature": 1,
    "top_p": 1.0,
    "frequency_penalty": 0,
    "best_of": 1,
    "suffix": "",
    "logit_bias": {},
    "logprobs": None,
}


@pytest.mark.parametrize(("name", "value"), NOTHING.items())
def test_what_says_nothing_is_accepted(name, value):
    assert read(Completion, {name: value, "n": 2}).n == 2


@pytest.mark.parametrize(
    ("cls", "body", "said"),
    [
        (Completion, [], "must be a JSON object"),
        (Completion, {"promt": "x"}, "`promt`: did you mean `prompt`?"),
        (Completion, {"zzz": 1}, "There is no field `zzz`"),
        (Completion, {"logprobs": 5}, "`logprobs` has no meaning"),
        (Completion, {"best_of": 4}, "`best_of` has no meaning"),
        (Completion, {"n": 0}, "`n` must be a whole number of at least 1 and at most 64"),
        (Completion, {"n": True}, "`n` must be"),
        (Completion, {"n": 1.5}, "`n` must be"),
        (Completion, {"n": "2"}, "`n` must be"),
        (Completion, {"seed": -1}, "`seed` must be"),
        (Completion, {"seed": 2**63}, "`seed` must be"),
        (Completion, {"stream": 1}, "`stream` must be true or false"),
        (Completion, {"prompt": [1, 2]}, "`prompt` must be a string of at most 20000 characters or a list of these"),
        (Completion, {"prompt": []}, "`prompt` must be"),
        (Completion, {"prompt": "half \ud800"}, "`prompt` must be"),
        (Completion, {"prompt": "x" * 20_001}, "`prompt` must be"),
        (Completion, {"stop": ["a"] * 5}, "at most 4"),
        (Completion, {"w": "much"}, "`w` must be a number"),
        (EmbeddingRequest, {}, "`input` is missing"),
        (EmbeddingRequest, {"input": "x", "pooling": "max"}, "`pooling` must be one of mean, flat"),
        (Interpolation, {"first": "x"}, "`second` is missing"),
    ],
)
def test_mistakes_are_named(cls, body, said):
    with pytest.raises(ApiError) as caught:
        read(cls, body)
    assert caught.value.status == 422 and said in caught.value.message


def test_the_description_has_every_field():
    found = description()
    assert found["openapi"] == "3.1.0" and set(POSTS) <= set(found["paths"])
    for path, (cls, _) in POSTS.items():
        schema = found["components"]["schemas"][cls.__name__]
        assert set(schema["properties"]) == set(rules(cls)) and all(p["description"] for p in schema["properties"].values())
        body = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{cls.__name__}"}
    assert found["components"]["schemas"]["Completion"]["properties"]["n"]["maximum"] == 64
