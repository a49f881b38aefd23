"""A server process with the bundled model, and OpenAI's own client."""

import openai
import pytest
import torch
from serving import PATIENCE, process

from jpeg_dlm import load


@pytest.fixture(scope="module")
def client():
    with process() as server:
        address = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=address, api_key="none", timeout=PATIENCE, max_retries=0) as client:
            yield client
        assert server.stop() == 0


def test_completions_and_embeddings(client):
    model = load(None, "cpu")
    assert [one.id for one in client.models.list()] == ["bundled"]
    answer = client.completions.create(model="bundled", prompt="", n=3, seed=5)
    assert [choice.text for choice in answer.choices] == list(model.generate(3, seed=5))
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"} and answer.usage.completion_tokens > 0
    fast = client.completions.create(model="bundled", prompt="", seed=5, extra_body={"steps": 11, "w": 2.5})
    assert fast.choices[0].text == model.generate(1, seed=5, steps=11, w=2.5)[0]
    with client.completions.create(model="bundled", prompt="", n=4, seed=6, max_tokens=40, stream=True) as stream:
        texts = {choice.index: choice.text for chunk in stream for choice in chunk.choices}
    assert texts == dict(enumerate(model.generate(4, seed=6)))
    texts = ["A dog is running in the grass.", "Two men are playing chess."]
    answer = client.embeddings.create(model="bundled", input=texts)  # the client asks for base64
    assert torch.allclose(torch.tensor([one.embedding for one in answer.data]), model.encode(texts).mean(1), atol=1e-4)


def test_errors_are_those_of_the_client(client):
    with pytest.raises(openai.UnprocessableEntityError, match="temperature"):
        client.completions.create(model="bundled", prompt="", temperature=0.3)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="")
    with pytest.raises(openai.UnprocessableEntityError, match="not trained on pairs"):
        client.completions.create(model="bundled", prompt="", extra_body={"source": "dog beach"})


def test_a_chat_continues_the_last_message(client):
    (expected,) = load(None, "cpu").generate(1, seed=3, prompt="Two dogs")
    answer = client.chat.completions.create(model="bundled", messages=[{"role": "user", "content": "Two dogs"}], seed=3)
    assert f"Two dogs{answer.choices[0].message.content}" == expected
