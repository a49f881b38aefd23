"""The service over HTTP, in a thread of the test: answers, limits, faults and keys. Nothing here depends on timing."""

import base64
import io
import json
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from serving import PATIENCE, Gated, eventually, in_thread

from jpeg_dlm.api import load
from jpeg_dlm.errors import UsageError
from jpeg_dlm.serve.app import Limits, Service
from jpeg_dlm.serve.auth import read_keys
from jpeg_dlm.serve.logs import Log
from jpeg_dlm.serve.models import load_models, serve_model

pytest_plugins = ["stand_in"]  # fixtures
SENTENCE = "The farmer plants corn."


@pytest.fixture(scope="module")
def folders(micro_folders):
    return {name: micro_folders(name) for name in ("jpeg-dlm", "ar", "mdlm", "cosmos")}


@pytest.fixture(scope="module")
def models(folders):
    return load_models([f"{name}={folder}" for name, folder in folders.items()], "cpu")


@pytest.fixture(scope="module")
def ask(models):
    with in_thread(Service(models, Limits())) as client:
        yield client


@pytest.fixture
def gated(folders):
    """A model that can be held, and its gate."""
    model = load(folders["jpeg-dlm"], "cpu", "exact")
    model.writer = Gated(model.writer)
    served = {"held": serve_model("held", model), "ar": serve_model("ar", load(folders["ar"], "cpu"))}
    yield served, model.writer
    model.writer.gate.set()


def plain(folders, name, n=1, **options):
    """What `generate` gives."""
    return list(load(folders[name], "cpu", "exact").generate(n, **options))


# ---------------------------------------------------------------- answers


def test_models_are_listed_with_what_they_can_do(ask):
    found = ask("/v1/models").json
    assert found["object"] == "list" and [one["id"] for one in found["data"]] == ["jpeg-dlm", "ar", "mdlm", "cosmos"]
    assert all({"object", "created", "owned_by"} <= set(one) for one in found["data"])
    can = {one["id"]: one["can"] for one in found["data"]}
    assert can["jpeg-dlm"]["reconstruct"] and can["jpeg-dlm"]["fast"] and not can["ar"]["reconstruct"] and can["ar"]["prompt"]
    assert "temperature" in found["data"][1]["options"] and "temperature" not in found["data"][0]["options"]
    assert ask("/v1/models/mdlm").json == found["data"][2]
    assert ask("/v1/models/nobody").status == 404


@pytest.mark.parametrize(
    ("name", "options"),
    [("jpeg-dlm", {}), ("jpeg-dlm", {"steps": 5, "w": 2.0, "solver": "heun"}), ("jpeg-dlm", {"fast": True}), ("ar", {}),
     ("ar", {"temperature": 0.5, "top_k": 20}), ("mdlm", {"steps": 4}), ("cosmos", {})],
)  # fmt: skip
def test_texts_are_those_of_generate(ask, folders, name, options):
    expected = plain(folders, name, 3, seed=11, **options)
    assert ask.texts(model=name, n=3, seed=11, **options) == expected
    events = ask("/v1/completions", {"model": name, "n": 3, "seed": 11, "stream": True, **options}).events
    assert {e["choices"][0]["index"]: e["choices"][0]["text"] for e in events} == dict(enumerate(expected))


def test_an_answer_has_the_form_of_openai(ask):
    found = ask("/v1/completions", {"model": "ar", "prompt": "", "n": 2, "max_tokens": 5, "temperature": 1}).json
    assert found["object"] == "text_completion" and found["id"].startswith("cmpl-") and found["model"] == "ar"
    assert [set(choice) for choice in found["choices"]] == [{"index", "text", "logprobs", "finish_reason"}] * 2
    assert found["usage"] == {"prompt_tokens": 0, "completion_tokens": 10, "total_tokens": 10}
    again = ask("/v1/completions", {"model": "ar", "n": 2, "max_tokens": 5, "seed": found["seed"]}).json
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in found["choices"]]  # a drawn seed is told


@pytest.mark.parametrize("name", ["ar", "mdlm"])
def test_prompts(ask, folders, name):
    prompts = [SENTENCE[:10], "The captain"]
    whole = [text for p in prompts for text in plain(folders, name, 2, seed=3, prompt=p)]
    assert ask.texts(model=name, prompt=prompts, n=2, seed=3, echo=True) == whole
    continued = ask.texts(model=name, prompt=prompts, n=2, seed=3)
    assert [p + rest for p, rest in zip([p for p in prompts for _ in range(2)], continued, strict=True)] == whole
    template = "The [MASK:2] reads [MASK]"
    assert ask.texts(model=name, template=template, seed=5) == plain(folders, name, 1, seed=5, template=template)


def test_guided_prompts_are_sampled_as_generate_does(folders):
    """A model whose writer says that it is guided: its own `sample` knows what else that needs."""
    model, asked = load(folders["ar"], "cpu"), []
    model.writer = Gated(model.writer)
    model.writer.gate.set()
    model.writer.supports = frozenset({"prompts", "templates", "guides"})
    real = model.sample
    model.sample = lambda n, **options: asked.append(n) or real(n, **options)
    with in_thread(Service({"guided": serve_model("guided", model)}, Limits(batch=2))) as ask:
        for n in (1, 5):
            assert ask.texts(prompt="The farmer", n=n, seed=3, echo=True) == plain(
                folders, "ar", n, seed=3, prompt="The farmer"
            )
        moments = ask("/v1/trajectory", {"prompt": "The farmer", "seed": 3}).json["moments"]
        assert moments[-1]["texts"] == plain(folders, "ar", 1, seed=3, prompt="The farmer")
        assert asked == [1, 5, 1] and ask.texts(seed=3) == plain(folders, "ar", 1, seed=3)


def test_texts_are_cut(ask, folders):
    (whole,) = plain(folders, "ar", seed=2)
    stop = whole[4:6]
    found = ask("/v1/completions", {"model": "ar", "seed": 2, "stop": [stop, "never there"]}).json["choices"][0]
    assert found["text"] == whole[: whole.index(stop)] and found["finish_reason"] == "stop"
    cut = ask("/v1/completions", {"model": "ar", "seed": 2, "max_tokens": 3}).json
    assert whole.startswith(cut["choices"][0]["text"]) and cut["usage"]["completion_tokens"] == 3
    assert cut["choices"][0]["finish_reason"] == "length"


def test_usage_is_streamed_if_asked_for(ask):
    body = {"model": "ar", "n": 2, "seed": 0, "stream": True, "stream_options": {"include_usage": True}}
    *texts, last = ask("/v1/completions", body).events
    assert len(texts) == 2 and last["choices"] == [] and last["usage"]["completion_tokens"] > 0


def test_embeddings_are_the_latents(ask, folders):
    texts = ["The farmer", "The captain"]
    latents = load(folders["jpeg-dlm"], "cpu").encode(texts)
    for pooling, expected in (("mean", latents.mean(1)), ("flat", latents.flatten(1))):
        body = {"model": "jpeg-dlm", "input": texts, "pooling": pooling}
        found = ask("/v1/embeddings", body).json
        assert torch.allclose(torch.tensor([one["embedding"] for one in found["data"]]), expected, atol=1e-5)
        coded = ask("/v1/embeddings", body | {"encoding_format": "base64"}).json["data"][1]["embedding"]
        raw = base64.b64decode(coded)
        assert torch.allclose(torch.tensor(struct.unpack(f"<{len(raw) // 4}f", raw)), expected[1], atol=1e-5)
    assert found["usage"]["prompt_tokens"] >= 4
    assert "16" in ask("/v1/embeddings", {"model": "jpeg-dlm", "input": "a", "dimensions": 5}).error


def test_reconstruction_marks_each_token(ask, folders):
    model = load(folders["jpeg-dlm"], "cpu")
    long = (SENTENCE + " \u00e9\u6f22 ") * 5
    found = ask("/v1/reconstruct", {"model": "jpeg-dlm", "input": [SENTENCE, long]}).json
    for text, one in zip([SENTENCE, long], found["data"], strict=True):
        ids = model.tokenizer.encode(text)
        assert one["text"] == model.reconstruct(text)[0] and one["of"] == len(ids) == len(one["before"]) == len(one["after"])
        assert "".join(piece["text"] for piece in one["before"]) == model.tokenizer.decode(ids)
        assert one["kept"] == sum(piece["kept"] for piece in one["before"])
        before, after = model.round_trip(text)
        assert [piece["kept"] for piece in one["after"]] == [a == b for a, b in zip(before, after, strict=True)]


def test_interpolation(ask, folders):
    ends = ("The farmer", "The smith")
    found = ask("/v1/interpolate", {"model": "jpeg-dlm", "first": ends[0], "second": ends[1], "points": 4}).json["data"]
    assert [one["text"] for one in found] == list(load(folders["jpeg-dlm"], "cpu").interpolate(*ends, points=4))
    assert [one["position"] for one in found] == [0, 0.3333, 0.6667, 1]


@pytest.mark.parametrize("name", ["jpeg-dlm", "ar", "mdlm"])
def test_a_trajectory_ends_with_the_text(ask, folders, name):
    expected = plain(folders, name, 2, seed=4)
    found = ask("/v1/trajectory", {"model": name, "n": 2, "seed": 4}).json
    last = found["moments"][-1]
    assert last["texts"] == expected and last["step"] == last["steps"] and found["moments"][0]["step"] == 0
    assert ("latents" in last) == (name == "jpeg-dlm")
    head, *moments = ask("/v1/trajectory", {"model": name, "n": 2, "seed": 4, "stream": True}).events
    assert moments == found["moments"] and head["seed"] == 4


def test_a_prompt_is_refused_if_the_writer_takes_none(gated):
    served, writer = gated
    writer.supports = frozenset()
    with in_thread(Service(served, Limits())) as ask:
        for body in ({"prompt": "The farmer"}, {"template": "a [MASK]"}):
            reply = ask("/v1/completions", {"model": "held"} | body)
            assert reply.status == 422 and "JPEG-DLM writes whole texts" in reply.json["error"]["message"]


def test_an_edit_is_offered_if_the_model_has_it(models, folders):
    model = load(folders["jpeg-dlm"], "cpu", "exact")
    model.edit = lambda text, noise, n, seed: [f"{text} {noise} {seed} {i}" for i in range(n)]
    with in_thread(Service({"able": serve_model("able", model), "ar": models["ar"]}, Limits())) as ask:
        assert [one["can"]["edit"] for one in ask("/v1/models").json["data"]] == [True, False]
        found = ask("/v1/edit", {"input": "x", "noise": 0.25, "n": 2, "seed": 9}).json
        assert [one["text"] for one in found["data"]] == ["x 0.25 9 0", "x 0.25 9 1"] and found["seed"] == 9
        assert ask("/v1/edit", {"model": "ar", "input": "x"}).status == 422


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", {"model": "nobody"}, 404, "There is no model 'nobody'"),
        ("/v1/completions", {"temperature": 0.7}, 422, "`temperature` has no meaning for JPEG-DLM"),
        ("/v1/completions", {"model": "ar", "w": 2}, 422, "`w` has no meaning"),
        ("/v1/completions", {"model": "ar", "fast": True}, 422, "`fast` has no meaning"),
        ("/v1/completions", {"solver": "magic"}, 422, "solver"),
        ("/v1/completions", {"model": "ar", "prompt": "farmer " * 40}, 422, "shorten it"),
        ("/v1/completions", {"model": "ar", "prompt": ["The"] * 40, "n": 2}, 422, "at most 64"),
        ("/v1/completions", {"model": "ar", "prompt": "The", "template": "[MASK] a"}, 422, "not both"),
        ("/v1/completions", {"model": "ar", "template": "a [MASK:99999999999]"}, 422, "longer than a text"),
        ("/v1/completions", {"model": "ar", "template": "a [MASK:13]"}, 422, "longer than a text"),
        ("/v1/trajectory", {"model": "ar", "prompt": ["a", "b"]}, 422, "one prompt"),
        ("/v1/embeddings", {"model": "ar", "input": "x"}, 422, "AR cannot embed texts"),
        ("/v1/embeddings", {"input": ""}, 422, "empty"),
        ("/v1/reconstruct", {"input": SENTENCE * 400}, 422, "send at most"),
        ("/v1/reconstruct", {"model": "cosmos", "input": "x"}, 422, "cannot reconstruct"),
        ("/v1/interpolate", {"first": SENTENCE * 9, "second": "x"}, 422, "shorten it"),
        ("/v1/edit", {"model": "ar", "input": "x"}, 422, "cannot edit"),
        ("/v1/nothing", {}, 404, "There is no POST /v1/nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_a_sentence(ask, path, body, status, said):
    reply = ask(path, body)
    assert reply.status == status and said in reply.error


@pytest.mark.parametrize("raw", [b"", b"{", b'{"n": 1', b"\xff\xfe", b'{"n": NaN}', b'{"n": 1, "n": 2}', b"[" * 5000, b"null"])
def test_broken_json(ask, raw):
    reply = ask("/v1/completions", raw=raw)
    assert reply.status == (422 if raw == b"null" else 400) and reply.error


def test_wrong_methods_and_types(ask):
    assert ask("/v1/completions").status == 405 and ask("/v1/models", {}).status == 405
    reply = ask("/v1/completions", raw=b"{}", Content_Type="text/plain")
    assert reply.status == 415 and "application/json" in reply.error


def test_bodies_that_are_too_large(ask):
    assert ask("/v1/completions", raw=b" " * 10_000_000).status == 413
    assert ask("/v1/completions", {"prompt": "x" * 1_100_000}).status == 413
    assert ask("/readyz").status == 200


def test_a_failure_of_the_server_tells_nothing_about_it(models, folders):
    model, stream = load(folders["jpeg-dlm"], "cpu"), io.StringIO()
    model.writer = Gated(model.writer)
    model.writer.sample = lambda *_: 1 // 0
    with in_thread(Service({"broken": serve_model("broken", model)}, Limits(), log=Log(stream=stream))) as ask:
        reply = ask("/v1/completions", {})
        assert reply.status == 500 and "division" not in reply.error
        events = ask("/v1/completions", {"stream": True}).body.decode()
        assert "division" not in events and "The server failed" in events
        assert ask("/readyz").status == 200
    assert "ZeroDivisionError" in stream.getvalue()  # for who runs it


# ---------------------------------------------------------------- limits


def test_a_full_queue_is_429_with_a_time_to_try_again(gated):
    models, writer = gated
    with in_thread(Service(models, Limits(queue=4, batch=2))) as ask, ThreadPoolExecutor(8) as threads:
        first = threads.submit(ask.texts, n=2, seed=0)
        assert writer.entered.wait(PATIENCE)
        waiting = [threads.submit(ask.texts, n=2, seed=seed) for seed in (1, 2)]
        eventually(lambda: ask("/readyz").json["waiting"] == 4)
        for body in ({}, {"stream": True}, {"n": 5}):
            reply = ask("/v1/completions", body)
            assert reply.status == 429 and "4 texts wait" in reply.error
            assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert ask("/v1/reconstruct", {"input": SENTENCE}).status == 429
        writer.gate.set()
        assert all(len(future.result(PATIENCE)) == 2 for future in [first, *waiting])
        assert len(ask.texts(n=3)) == 3


def test_an_answer_that_takes_too_long_is_504_and_its_work_is_dropped(gated):
    models, writer = gated
    service = Service(models, Limits(seconds=2))
    with in_thread(service) as ask:
        for body in ({"n": 3}, {"n": 3, "stream": True}):
            reply = ask("/v1/completions", body)
            if "stream" in body:
                assert reply.status == 200 and "took more than 2 s" in reply.body.decode()
            else:
                assert reply.status == 504 and "took more than 2 s" in reply.error
        assert "took more" in ask("/v1/trajectory", {"stream": True}).body.decode()
        writer.entered.clear()
        eventually(lambda: service.batching.waiting == 0)


def test_a_request_that_arrives_too_slowly_is_408(models):
    with in_thread(Service(models, Limits(seconds=0.3))) as ask, socket.create_connection(("127.0.0.1", ask.port)) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        slow.settimeout(PATIENCE)
        assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")


def raw_request(port, body):
    """A connection on which a request was sent and no answer read."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_work_of_a_client_that_went_away_is_dropped(gated, stream):
    """Both what waits and what runs: the gate stays closed, so only dropping ends it."""
    models, writer = gated
    service = Service(models, Limits(batch=2))
    with in_thread(service) as ask:
        running = raw_request(ask.port, {"n": 2, "stream": stream})
        assert writer.entered.wait(PATIENCE)
        clients = [raw_request(ask.port, {"n": 2, "seed": seed, "stream": stream}) for seed in range(3)]
        eventually(lambda: service.batching.waiting == 6)
        for client in clients:
            client.close()
        eventually(lambda: service.batching.waiting == 0)
        running.close()
        held = service.batching.call(lambda: "free")
        assert held.result(PATIENCE) == "free" and len(writer.rows) == 1


def test_a_client_that_does_not_read_holds_nobody_up(ask):
    stuck = [raw_request(ask.port, {"model": "ar", "n": 8, "stream": True}) for _ in range(20)]
    assert len(ask.texts(model="ar", n=2)) == 2
    for client in stuck:
        client.close()


def test_a_closing_server_finishes_what_it_has(gated):
    models, writer = gated
    service = Service(models, Limits(batch=1))
    with ThreadPoolExecutor(4) as threads:
        with in_thread(service) as ask:
            asked = [threads.submit(ask.texts, n=2, seed=seed) for seed in range(3)]
            assert writer.entered.wait(PATIENCE)
            eventually(lambda: service.batching.waiting == 5)
            threading.Timer(0.3, writer.gate.set).start()
        assert all(len(future.result(0)) == 2 for future in asked)
    assert not service.batching.alive


# ---------------------------------------------------------------- keys, origins, metrics, logs


def test_keys(models, tmp_path):
    (tmp_path / "keys").write_text("# two of them\nfirst-key-0123456789\n\nsecond-key-0123456789\n")
    keys = read_keys(tmp_path / "keys")
    assert len(keys) == 2 and b"first" not in b"".join(keys)
    with in_thread(Service(models, Limits(), keys)) as ask:
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            reply = ask(path)
            assert reply.status == 401 and "needs a key" in reply.error and reply.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer wrong", "Bearer ", "first-key-0123456789", "Basic first-key-0123456789", "Bearer \u00e9"):
            assert ask("/v1/models", Authorization=wrong.encode("latin-1")).status == 401
        for key in ("first-key-0123456789", "second-key-0123456789"):
            assert ask("/v1/models", Authorization=f"Bearer {key}").status == 200
        assert ask("/").status == ask("/page.js").status == ask("/healthz").status == ask("/readyz").status == 200


@pytest.mark.parametrize(("content", "said"), [("# none\n", "no key"), ("short\n", "fewer than 16")])
def test_keys_that_protect_nothing(tmp_path, content, said):
    (tmp_path / "keys").write_text(content)
    with pytest.raises(UsageError, match=said):
        read_keys(tmp_path / "keys")


def test_other_origins_are_refused_unless_asked_for(models, ask):
    asking = {"Origin": "https://page.example", "Access_Control_Request_Method": "POST"}
    reply = ask("/v1/completions", method="OPTIONS", **asking)
    assert reply.status == 405 and "access-control-allow-origin" not in reply.headers
    assert "access-control-allow-origin" not in ask("/v1/models", Origin="https://page.example").headers
    with in_thread(Service(models, Limits()), ("https://page.example",)) as allowing:
        reply = allowing("/v1/completions", method="OPTIONS", **asking)
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-origin" not in allowing("/v1/models", Origin="https://other.example").headers


def test_metrics_and_logs(models):
    stream = io.StringIO()
    with in_thread(Service(models, Limits(), log=Log(True, stream))) as ask:
        ask.texts(n=3, seed=0)
        ask("/v1/completions", {"n": 0})
        ask("/not/there/at/all")
        found = ask("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(found.body.decode())}
    counted = {
        (s.labels["path"], s.labels["status"]): s.value for s in families["jpeg_dlm_requests"].samples if "total" in s.name
    }
    assert counted == {("/v1/completions", "200"): 1, ("/v1/completions", "422"): 1, ("other", "404"): 1}
    values = {s.name: s.value for family in families.values() for s in family.samples if not s.labels}
    assert values["jpeg_dlm_texts_total"] == 3 and values["jpeg_dlm_queue_texts"] == 0
    assert values["jpeg_dlm_batch_rows_count"] == 1 and values["jpeg_dlm_batch_rows_sum"] == 3
    assert values["jpeg_dlm_texts_per_second"] > 0 and values["jpeg_dlm_requests_running"] == 1
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["status"] for line in lines] == [200, 422, 404, 200]
    assert lines[0]["texts"] == 3 and lines[0]["model"] == "jpeg-dlm" and lines[0]["seconds"] >= 0 and lines[0]["id"]
    assert "not/there" not in stream.getvalue()  # neither labels nor lines that a client can make up


def test_models_by_name(folders, tmp_path, monkeypatch):
    found = load_models([str(folders["ar"]), f"other={folders['mdlm']}"], "cpu")
    assert list(found) == ["ar", "other"] and found["other"].title == "MDLM"
    with pytest.raises(UsageError, match="NAME="):
        load_models([str(folders["ar"]), str(folders["ar"])], "cpu")
    monkeypatch.chdir(tmp_path)
    assert list(load_models([], "cpu")) == list(load_models(["bundled"], "cpu")) == ["bundled"]
