"""A server process with the bundled model, and OpenAI's own client."""

import openai
import pytest
import torch
from serving import PATIENCE, process

from jpeg_dlm import load


@pytest.fixture(scope="module")
def server():
    with process() as found:
        yield found
        assert found.stop() == 0


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def model():
    return load(None, "cpu", "exact")


def test_models(client):
    assert [one.id for one in client.models.list()] == ["bundled"]
    assert client.models.retrieve("bundled").owned_by == "jpeg-dlm"


def test_completions(client, model):
    found = client.completions.create(model="bundled", prompt="", n=3, seed=5)
    assert [choice.text for choice in found.choices] == list(model.generate(3, seed=5))
    assert {choice.finish_reason for choice in found.choices} <= {"stop", "length"} and found.usage.completion_tokens > 0
    fast = client.completions.create(model="bundled", prompt="", seed=5, extra_body={"fast": True, "w": 2.5})
    assert fast.choices[0].text == model.generate(1, seed=5, fast=True, w=2.5)[0]


def test_streaming(client, model):
    with client.completions.create(model="bundled", prompt="", n=4, seed=6, max_tokens=40, stream=True) as stream:
        found = {choice.index: choice.text for chunk in stream for choice in chunk.choices}
    assert found == dict(enumerate(model.generate(4, seed=6)))


def test_embeddings(client, model):
    texts = ["A dog is running in the grass.", "Two men are playing chess."]
    expected = model.encode(texts)
    found = client.embeddings.create(model="bundled", input=texts)  # the client asks for base64
    assert torch.allclose(torch.tensor([one.embedding for one in found.data]), expected.mean(1), atol=1e-4)
    flat = client.embeddings.create(model="bundled", input=texts[1], encoding_format="float", extra_body={"pooling": "flat"})
    assert torch.allclose(torch.tensor(flat.data[0].embedding), expected[1].flatten(), atol=1e-4)


def test_errors_are_those_of_the_client(client):
    with pytest.raises(openai.UnprocessableEntityError, match="has no meaning for JPEG-DLM"):
        client.completions.create(model="bundled", prompt="", temperature=0.3)
    with pytest.raises(openai.NotFoundError, match="There is no model 'other'"):
        client.completions.create(model="other", prompt="")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="bundled", messages=[{"role": "user", "content": "hello"}])


def test_plain_http(server, model):
    assert server.ask("/healthz").json == {"status": "ok"} and server.ask("/readyz").json["status"] == "ready"
    assert server.ask.texts(seed=7, n=2) == list(model.generate(2, seed=7))
    back = server.ask("/v1/reconstruct", {"input": "A dog is running in the grass."}).json["data"][0]
    assert back["text"] == model.reconstruct("A dog is running in the grass.")[0]
    moments = server.ask("/v1/trajectory", {"seed": 7, "n": 2}).json["moments"]
    assert moments[-1]["texts"] == list(model.generate(2, seed=7)) and len(moments[0]["latents"][0]) == 4
