"""Models of pairs over HTTP: completions of a source, and chats, also by OpenAI's client."""

import openai
import pytest
from micro import perturb
from serving import PATIENCE, in_thread

from jpeg_dlm.api import load
from jpeg_dlm.serve.app import Service
from jpeg_dlm.serve.models import serve_model
from jpeg_dlm.util.errors import JpegDlmError

SOURCE = "The smith"
PAIRS = {"data__source_len": 12, "data__packing": "padded"}
NAMES = ("jpeg-dlm", "ar")
CHAT = [
    {"role": "system", "content": "Ignored."},
    {"role": "user", "content": "Not this."},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "user", "content": SOURCE},
    {"role": "assistant", "content": "Nor this."},
]


@pytest.fixture(scope="module")
def folders(micro_folders):
    return {name: micro_folders(name, **PAIRS) for name in NAMES} | {"free": micro_folders("ar")}


def loaded(folder):
    """A model whose fresh zeros are moved, so that its texts depend on their source."""
    model = load(folder, "cpu")
    perturb(model.method, 1.2)
    return model


@pytest.fixture(scope="module")
def plain(folders):
    return {name: loaded(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def ask(folders):
    with in_thread(Service({name: serve_model(name, loaded(folder)) for name, folder in folders.items()})) as client:
        yield client


@pytest.fixture(scope="module")
def client(ask):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{ask.port}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as client:
        yield client


def test_models_say_whether_they_read_sources(ask):
    can = {one["id"]: one["can"] for one in ask("/v1/models").json["data"]}
    assert [can[name]["source"] for name in (*NAMES, "free")] == [True, True, False]
    assert [can[name]["prompt"] for name in (*NAMES, "free")] == [False, False, True]
    assert can["jpeg-dlm"]["reconstruct"] and not can["jpeg-dlm"]["edit"]


@pytest.mark.parametrize("name", NAMES)
def test_targets_are_those_of_generate(ask, plain, name):
    model, body = plain[name], {"model": name, "source": SOURCE, "n": 3, "seed": 11}
    expected = model.generate(3, seed=11, source=SOURCE)
    answer = ask("/v1/completions", body | {"prompt": ""}).json
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == len(model.tokenizer.encode(SOURCE))
    events = ask("/v1/completions", body | {"stream": True}).events
    assert {c["index"]: c["text"] for event in events for c in event["choices"]} == dict(enumerate(expected))
    assert list(ask("/v1/trajectory", body).json["moments"][-1]["texts"]) == expected  # what the page shows
    other = ask.texts(model=name, source="A captain reads", n=3, seed=11)
    assert expected != other == model.generate(3, seed=11, source="A captain reads")


def test_options_and_cuts_are_those_of_completions(ask, plain):
    expected = plain["jpeg-dlm"].generate(2, seed=4, source=SOURCE, steps=5, w=2.0)
    assert ask.texts(model="jpeg-dlm", source=SOURCE, n=2, seed=4, steps=5, w=2.0) == expected
    body = {"model": "ar", "messages": CHAT, "seed": 1}
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask("/v1/chat/completions", body | {name: 2}).json
        assert answer["usage"]["completion_tokens"] == 2 and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_writes_targets_of_the_last_message_of_a_user(client, plain, name):
    expected = plain[name].generate(3, seed=5, source=SOURCE)
    answer = client.chat.completions.create(model=name, messages=CHAT, n=3, seed=5)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert [choice.message.content for choice in answer.choices] == expected
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0
    options = {"stream_options": {"include_usage": True}}
    with client.chat.completions.create(model=name, messages=CHAT, n=3, seed=5, stream=True, **options) as stream:
        chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {c.index: c.delta.content for chunk in chunks for c in chunk.choices} == dict(enumerate(expected))
    assert chunks[-1].usage == answer.usage and not chunks[-1].choices


def test_a_chat_continues_a_prompt_of_another_model(client, plain):
    expected = plain["free"].generate(2, seed=5, prompt=SOURCE)
    answer = client.chat.completions.create(model="free", messages=CHAT, n=2, seed=5)
    assert [SOURCE + choice.message.content for choice in answer.choices] == expected


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("completions", {"model": "ar"}, "send one as `source`"),
        ("trajectory", {"model": "jpeg-dlm"}, "send one as `source`"),
        ("completions", {"model": "ar", "source": SOURCE, "prompt": "The"}, "`prompt` has no meaning"),
        ("completions", {"model": "ar", "source": SOURCE, "template": "The [MASK]"}, "`template` has no meaning"),
        ("completions", {"model": "free", "source": SOURCE}, "not trained on pairs"),
        ("completions", {"model": "ar", "source": "farmer " * 40}, "shorten"),
        ("completions", {"model": "ar", "source": ""}, "empty"),
        ("completions", {"model": "ar", "source": [SOURCE]}, "`source`"),
        ("edit", {"model": "jpeg-dlm", "input": SOURCE}, "cannot edit"),
        ("chat/completions", {"model": "ar"}, "`messages`"),
        ("chat/completions", {"model": "ar", "messages": []}, "`messages`"),
        ("chat/completions", {"model": "ar", "messages": CHAT[:1]}, "no text of a user"),
        ("chat/completions", {"model": "ar", "messages": [*CHAT, {"role": "user"}]}, "no text of a user"),
        ("chat/completions", {"model": "ar", "messages": [{"role": "user", "content": [{}]}]}, "must be text"),
        ("chat/completions", {"model": "ar", "messages": [{"role": "nobody", "content": "x"}]}, "`messages`"),
        ("chat/completions", {"model": "ar", "messages": CHAT, "source": SOURCE}, "`source`"),
        ("chat/completions", {"model": "ar", "messages": CHAT, "tools": []}, "`tools`"),
    ],
)
def test_what_is_not_taken_is_said_in_a_sentence(ask, path, body, words):
    reply = ask(f"/v1/{path}", body)
    assert reply.status == 422 and words in reply.error and reply.error.count(". ") == 0


def test_the_description_has_both_requests(ask):
    described = ask("/openapi.json").json
    assert "/v1/chat/completions" in described["paths"]
    schemas = described["components"]["schemas"]
    assert "source" in schemas["Completion"]["properties"] and "messages" in schemas["Chat"]["required"]
    assert not {"prompt", "template", "source", "echo"} & set(schemas["Chat"]["properties"])


def test_a_model_that_cannot_encode_sources_is_not_served(folders, monkeypatch):
    model = load(folders["jpeg-dlm"], "cpu")

    def missing():
        raise JpegDlmError("no encoder")

    monkeypatch.setattr(model, "complete_method", missing)
    with pytest.raises(JpegDlmError, match="no encoder"):
        serve_model("pairs", model)
