"""The service over HTTP, in a thread of the test: answers, limits, faults and keys. Nothing here depends on timing."""

import base64
import json
import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from serving import PATIENCE, Gated, eventually, in_thread

from jpeg_dlm.api import load
from jpeg_dlm.serve.app import Service
from jpeg_dlm.serve.http import read_keys
from jpeg_dlm.serve.models import load_models, serve_model
from jpeg_dlm.util.errors import UsageError

pytest_plugins = ["stand_in"]  # fixtures
SENTENCE = "The farmer plants corn."
NAMES = ("jpeg-dlm", "ar", "mdlm")


@pytest.fixture(scope="module")
def models(micro_folders):
    return load_models([f"{name}={micro_folders(name)}" for name in NAMES], "cpu")


@pytest.fixture(scope="module")
def plain(micro_folders):
    """The models without a service: what `generate` and the others give."""
    return {name: load(micro_folders(name), "cpu") for name in NAMES}


@pytest.fixture(scope="module")
def ask(models):
    with in_thread(Service(models)) as client:
        yield client


@pytest.fixture
def gated(micro_folders):
    """A model that can be held, and its gate."""
    model = load(micro_folders("jpeg-dlm"), "cpu")
    model.writer = Gated(model.writer)
    yield {"held": serve_model("held", model)}, model.writer
    model.writer.gate.set()


# ---------------------------------------------------------------- answers


def test_models_are_listed_with_what_they_can_do(ask):
    listed = ask("/v1/models").json["data"]
    assert [one["id"] for one in listed] == list(NAMES)
    can = {one["id"]: one["can"] for one in listed}
    assert can["jpeg-dlm"]["reconstruct"] and not can["ar"]["reconstruct"] and can["ar"]["prompt"]
    assert "temperature" in listed[1]["options"] and "temperature" not in listed[0]["options"]
    assert ask("/v1/models/mdlm").json == listed[2] and ask("/v1/models/nobody").status == 404


@pytest.mark.parametrize(
    ("name", "options"),
    [("jpeg-dlm", {"steps": 5, "w": 2.0, "solver": "euler"}), ("ar", {"temperature": 0.5, "top_k": 20}), ("mdlm", {})],
)
def test_texts_are_those_of_generate(ask, plain, name, options):
    expected = list(plain[name].generate(3, seed=11, **options))
    assert ask.texts(model=name, n=3, seed=11, **options) == expected
    events = ask("/v1/completions", {"model": name, "n": 3, "seed": 11, "stream": True, **options}).events
    assert {e["choices"][0]["index"]: e["choices"][0]["text"] for e in events} == dict(enumerate(expected))


def test_an_answer_has_the_form_of_openai(ask):
    neutral = {"best_of": 1, "logprobs": None, "logit_bias": {}, "presence_penalty": 0, "user": "me", "top_p": 1}
    answer = ask("/v1/completions", {"model": "ar", "prompt": "", "n": 2, "max_tokens": 5, "temperature": 1, **neutral}).json
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == "ar"
    assert [set(choice) for choice in answer["choices"]] == [{"index", "text", "logprobs", "finish_reason"}] * 2
    assert answer["usage"] == {"prompt_tokens": 0, "completion_tokens": 10, "total_tokens": 10}
    again = ask.texts(model="ar", n=2, max_tokens=5, seed=answer["seed"])  # a drawn seed is told
    assert again == [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("name", ["ar", "mdlm"])
def test_prompts(ask, plain, name):
    prompts = [SENTENCE[:10], "The captain"]
    whole = [text for p in prompts for text in plain[name].generate(2, seed=3, prompt=p)]
    assert ask.texts(model=name, prompt=prompts, n=2, seed=3, echo=True) == whole
    continued = ask.texts(model=name, prompt=prompts, n=2, seed=3)
    assert [p + rest for p, rest in zip([p for p in prompts for _ in range(2)], continued, strict=True)] == whole
    template = "The [MASK:2] reads [MASK]"
    assert ask.texts(model=name, template=template, seed=5) == list(plain[name].generate(1, seed=5, template=template))


def test_guided_prompts_are_sampled_as_generate_does(ask, plain):
    expected = list(plain["jpeg-dlm"].generate(5, seed=3, prompt="The farmer"))
    assert ask.texts(model="jpeg-dlm", prompt="The farmer", n=5, seed=3, echo=True) == expected
    moments = ask("/v1/trajectory", {"model": "jpeg-dlm", "prompt": "The farmer", "seed": 3}).json["moments"]
    assert moments[-1]["texts"] == expected[:1]


def test_texts_are_cut(ask, plain):
    (whole,) = plain["ar"].generate(1, seed=2)
    stop, body = whole[4:6], {"model": "ar", "seed": 2}
    (choice,) = ask("/v1/completions", body | {"stop": [stop, "never there"]}).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    cut = ask("/v1/completions", body | {"max_tokens": 3}).json
    assert whole.startswith(cut["choices"][0]["text"]) and cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 3


def test_embeddings_are_the_latents(ask, plain):
    texts = ["The farmer", "The captain"]
    latents = plain["jpeg-dlm"].encode(texts)
    for pooling, expected in (("mean", latents.mean(1)), ("flat", latents.flatten(1))):
        body = {"model": "jpeg-dlm", "input": texts, "pooling": pooling}
        answer = ask("/v1/embeddings", body).json
        assert torch.allclose(torch.tensor([one["embedding"] for one in answer["data"]]), expected, atol=1e-5)
        raw = base64.b64decode(ask("/v1/embeddings", body | {"encoding_format": "base64"}).json["data"][1]["embedding"])
        assert torch.allclose(torch.tensor(struct.unpack(f"<{len(raw) // 4}f", raw)), expected[1], atol=1e-5)
    assert answer["usage"]["prompt_tokens"] >= 4
    assert "16" in ask("/v1/embeddings", {"model": "jpeg-dlm", "input": "a", "dimensions": 5}).error


def test_reconstruction_marks_each_token(ask, plain):
    model, long = plain["jpeg-dlm"], (SENTENCE + " \u00e9\u6f22 ") * 5
    answer = ask("/v1/reconstruct", {"model": "jpeg-dlm", "input": [SENTENCE, long]}).json
    for text, one in zip([SENTENCE, long], answer["data"], strict=True):
        before, after = model.round_trip(text)
        same = [a == b for a, b in zip(before, after, strict=True)]
        assert one["text"] == model.reconstruct(text)[0] and one["of"] == len(same) and one["kept"] == sum(same)
        assert "".join(piece["text"] for piece in one["before"]) == model.tokenizer.decode(model.tokenizer.encode(text))
        assert same == [piece["kept"] for piece in one["before"]] == [piece["kept"] for piece in one["after"]]


def test_interpolations_and_edits(ask, plain):
    model, ends = plain["jpeg-dlm"], ("The farmer", "The smith")
    points = ask("/v1/interpolate", {"first": ends[0], "second": ends[1], "points": 4}).json["data"]
    assert [one["text"] for one in points] == list(model.interpolate(*ends, points=4))
    assert [one["position"] for one in points] == [0, 0.3333, 0.6667, 1]
    varied = ask("/v1/edit", {"input": SENTENCE[:10], "n": 3, "noise": 0.7, "seed": 5}).json["data"]
    assert [one["text"] for one in varied] == model.edit(SENTENCE[:10], n=3, noise=0.7, seed=5)


@pytest.mark.parametrize("name", ["jpeg-dlm", "ar", "mdlm"])
def test_a_trajectory_ends_with_the_text(ask, plain, name):
    moments = ask("/v1/trajectory", {"model": name, "n": 2, "seed": 4}).json["moments"]
    last = moments[-1]
    assert last["texts"] == list(plain[name].generate(2, seed=4))
    assert last["step"] == last["steps"] and moments[0]["step"] == 0 and ("latents" in last) == (name == "jpeg-dlm")
    head, *streamed = ask("/v1/trajectory", {"model": name, "n": 2, "seed": 4, "stream": True}).events
    assert streamed == moments and head["seed"] == 4


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        *(
            ("/v1/completions", {name: value}, f"`{name}`")
            for name, value in {"temperature": 0.7, "best_of": 3, "n": True, "steps": 1e9, "prompt": [], "unknown": 1}.items()
        ),
        ("/v1/completions", {"solver": "magic"}, "solver"),
        ("/v1/completions", {"model": "ar", "prompt": "farmer " * 40}, "shorten"),
        ("/v1/completions", {"model": "ar", "prompt": ["The"] * 40, "n": 2}, "at most 64"),
        ("/v1/completions", {"model": "ar", "template": "a [MASK:99999999999]"}, "shorten"),
        ("/v1/trajectory", {"model": "ar", "prompt": ["a", "b"]}, "`prompt`"),
        ("/v1/trajectory", {"solver": "magic", "stream": True}, "solver"),
        ("/v1/embeddings", {"model": "ar", "input": "x"}, "AR"),
        ("/v1/embeddings", {"input": ""}, "empty"),
        ("/v1/reconstruct", {"input": SENTENCE * 400}, "at most"),
        ("/v1/edit", {"model": "ar", "input": "x"}, "edit"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(ask, path, body, name):
    reply = ask(path, body)
    assert reply.status == 422 and name in reply.error


@pytest.mark.parametrize("raw", [b"{", b'{"n": 1', b"\xff\xfe", b"[" * 5000, b"", b"null", b'{"w": NaN}', b'{"\\ud800": 1}'])
def test_broken_bodies(ask, raw):
    reply = ask("/v1/completions", raw=raw)
    assert reply.status in (400, 422) and reply.error


def test_a_body_of_very_many_keys_one_of_them_twice(ask):
    """It is answered before each key gets an error of its own; searching for the repeated one would stop the service."""
    keys = ",".join(f'"{i % 90_000}":1' for i in range(90_001))
    for raw in (f"{{{keys}}}", f'{{"logit_bias": {{{keys}}}}}'):
        reply = ask("/v1/completions", raw=raw.encode())
        assert reply.status == 422 and len(reply.error) < 300


def test_wrong_paths_methods_types_and_sizes(ask):
    assert ask("/v1/completions", {"model": "nobody"}).status == ask("/v1/nothing", {}).status == 404
    assert ask("/v1/completions").status == 405 and ask("/v1/models", {}).status == 405
    reply = ask("/v1/completions", raw=b"{}", Content_Type="text/plain")
    assert reply.status == 422 and "application/json" in reply.error
    assert ask("/v1/completions", raw=b" " * 10_000_000).status == 413
    assert ask("/readyz").status == 200


def test_a_failure_of_the_server_tells_nothing_about_it(gated, caplog):
    models, writer = gated
    writer.sample = lambda *_: 1 // 0
    with in_thread(Service(models)) as ask:
        reply = ask("/v1/completions", {})
        assert reply.status == 500 and "division" not in reply.error
        events = ask("/v1/completions", {"stream": True}).body.decode()
        assert "division" not in events and "The server failed" in events
        assert ask("/readyz").status == 200
    assert "ZeroDivisionError" in caplog.text  # for who runs it


# ---------------------------------------------------------------- limits


def test_a_full_queue_is_429_with_a_time_to_try_again(gated):
    models, writer = gated
    with in_thread(Service(models, queue=4, batch=2)) as ask, ThreadPoolExecutor(8) as threads:
        first = threads.submit(ask.texts, n=2, seed=0)
        assert writer.entered.wait(PATIENCE)
        waiting = [threads.submit(ask.texts, n=2, seed=seed) for seed in (1, 2)]
        eventually(lambda: ask("/readyz").json["waiting"] == 4)
        for body in ({}, {"stream": True}, {"n": 5}):
            reply = ask("/v1/completions", body)
            assert reply.status == 429 and "4 texts wait" in reply.error and int(reply.headers["retry-after"]) >= 1
        assert ask("/v1/reconstruct", {"input": SENTENCE}).status == 429
        writer.gate.set()
        assert all(len(future.result(PATIENCE)) == 2 for future in [first, *waiting])
        assert len(ask.texts(n=3)) == 3


def test_an_answer_that_takes_too_long_is_504_and_its_work_is_dropped(gated):
    service = Service(gated[0], limit_s=1)
    with in_thread(service) as ask:
        reply = ask("/v1/completions", {"n": 3})
        assert reply.status == 504 and "took more than 1 s" in reply.error
        for path in ("/v1/completions", "/v1/trajectory"):
            assert "took more than 1 s" in ask(path, {"stream": True}).body.decode()
        assert service.batching.call(lambda _: "free").result(PATIENCE) == "free" and service.batching.waiting == 0


def raw_request(port, path, body, length=0):
    """A connection on which a request was sent, of `length` bytes if all of them come, and no answer read."""
    data = json.dumps(body).encode()
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {length or len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    connection.sendall(f"POST {path} HTTP/1.1\r\n{fields}".encode() + data)
    return connection


def test_a_request_that_arrives_too_slowly_is_given_up(models):
    with in_thread(Service(models, limit_s=0.1)) as ask:
        with raw_request(ask.port, "/v1/completions", {}, length=99) as slow:
            assert slow.recv(1000).startswith(b"HTTP/1.1 504 ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/trajectory"])
def test_work_of_a_client_that_went_away_is_dropped(gated, path, stream):
    """Both what waits and what runs: the gate stays closed, so only dropping ends it."""
    models, writer = gated
    service = Service(models, batch=2)
    with in_thread(service) as ask:
        running = raw_request(ask.port, path, {"n": 2, "stream": stream})
        assert writer.entered.wait(PATIENCE)
        clients = [raw_request(ask.port, path, {"n": 2, "seed": seed, "stream": stream}) for seed in range(3)]
        eventually(lambda: service.batching.waiting == 6)
        for client in clients:
            client.close()
        eventually(lambda: service.batching.waiting == 0)
        running.close()
        assert service.batching.call(lambda _: "free").result(PATIENCE) == "free" and len(writer.rows) == 1


# ---------------------------------------------------------------- keys, origins, metrics, the description


def test_keys(models, tmp_path):
    (tmp_path / "keys").write_text("# two of them\nfirst-key-0123456789\n\nsecond-key-0123456789\n")
    keys = read_keys(tmp_path / "keys")
    assert len(keys) == 2 and b"first" not in b"".join(keys)
    with in_thread(Service(models, keys=keys)) as ask:
        for path in ("/v1/models", "/metrics"):
            reply = ask(path)
            assert reply.status == 401 and "needs a key" in reply.error and reply.headers["www-authenticate"] == "Bearer"
        assert ask("/v1/completions", {}).status == 401
        for wrong in ("Bearer wrong", "Bearer ", "first-key-0123456789", "Basic first-key-0123456789", "Bearer \u00e9"):
            assert ask("/v1/models", Authorization=wrong.encode("latin-1")).status == 401
        for key in ("first-key-0123456789", "second-key-0123456789"):
            assert ask("/v1/models", Authorization=f"Bearer {key}").status == 200
        assert all(ask(path).status == 200 for path in ("/", "/page.js", "/healthz", "/readyz", "/openapi.json"))
    for content in ("# none\n", "short\n"):
        (tmp_path / "keys").write_text(content)
        with pytest.raises(UsageError):
            read_keys(tmp_path / "keys")


def test_other_origins_are_refused_unless_asked_for(models, ask):
    asking = {"Origin": "https://page.example", "Access_Control_Request_Method": "POST"}
    assert "access-control-allow-origin" not in ask("/v1/completions", method="OPTIONS", **asking).headers
    with in_thread(Service(models), ("https://page.example",)) as allowing:
        reply = allowing("/v1/completions", method="OPTIONS", **asking)
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-origin" not in allowing("/v1/models", Origin="https://other.example").headers


def test_metrics(models):
    service = Service(models)
    with in_thread(service) as ask:
        ask.texts(n=3, seed=0)
        # A batch is counted just after its last answer.
        eventually(lambda: service.metrics.registry.get_sample_value("jpeg_dlm_texts_total") == 3)
        ask("/v1/completions", {"n": 0})
        ask("/not/there/at/all")
        families = text_string_to_metric_families(ask("/metrics").body.decode())
        values = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    counted = {key[1:]: value for key, value in values.items() if key[0] == "jpeg_dlm_requests_total"}
    # No label is one that a client can make up.
    assert counted == {("/v1/completions", "200"): 1, ("/v1/completions", "422"): 1, ("other", "404"): 1}
    expected = {"texts_total": 3, "queue_texts": 0, "batch_rows_count": 1, "batch_rows_sum": 3, "requests_running": 1}
    assert {name: values[(f"jpeg_dlm_{name}",)] for name in expected} == expected


def test_the_description_says_what_is_checked(ask):
    described = ask("/openapi.json").json
    fields = described["components"]["schemas"]["Completion"]["properties"]
    lists = next(kind for kind in fields["prompt"]["anyOf"] if kind.get("type") == "array")
    assert (lists["minItems"], lists["maxItems"]) == (1, 64) and fields["n"]["maximum"] == 64
    largest = fields["seed"]["maximum"]  # exact, though it is written as a real number
    assert ask("/v1/completions", {"seed": int(largest)}).status == 200
    assert ask("/v1/completions", {"seed": int(largest) + 1}).status == 422
    blank = described["components"]["schemas"]["Edit"]["properties"]["input"]
    for text in ("", " ", "a"):
        refused = len(text) < blank["minLength"] or not re.search(blank["pattern"], text)
        assert (ask("/v1/edit", {"input": text}).status == 422) == refused
    assert list(described["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
