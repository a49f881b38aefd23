"""The folder for browsers, in Chromium: the same noise, ids and tokens as in Python, and the page itself."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from micro import micro_model
from refusals import refusal
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait
from tokenizers import Tokenizer, normalizers

from jpeg_dlm.api import Model, load
from jpeg_dlm.checkpoints.model_folder import ModelParts
from jpeg_dlm.cli.main import main
from jpeg_dlm.export import web
from jpeg_dlm.text.tokenizer import TRAINED
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.files import verify_manifest
from jpeg_dlm.util.rng import RowNoise

PATIENCE = 600  # seconds; a busy machine is slow
SEEDS = (0, 1, 2, 3, 7, 12345, 2**31 + 5, 2**53 - 1)
FRENCH = """Où est-ce que tu vas ? J'ai déjà mangé chez mon frère. L'été dernier, nous avons été à la plage.
Ça n'a pas d'importance, n'est-ce pas ? « Très bien », dit-elle. Il coûte 1 250,50 € à Noël. Le garçon aime le gâteau."""
HARD = [
    "naïve coöperation ÆØÅ",
    "I'll say it's they're we'd",
    "日本語 and 한국어",
    "👩‍👧 e\u0301 ﬁ",
    "<pad> </s>",
    "a\u00a0b\u3000c\td",
    "٣ x² ½",
    "--?!...",
    "\ufeffx\x85y\x1cz",
]
ALL = FRENCH.splitlines() + FRENCH.split() + HARD

PRELUDE = """const done = arguments[arguments.length - 1];
const act = async (...given) => { BODY };
act(...arguments).then(done, error => done("error: " + error));"""
NUMBERS = "const { normal } = await import('./noise.js'); return Array.from(normal(given[0], given[1], given[2], given[3]));"
IDS = """const { Tokenizer } = await import('./tokenizer.js'), tokenizer = new Tokenizer(JSON.parse(given[0]));
return given[1].map(text => { const ids = tokenizer.encode(text); return [ids, tokenizer.decode(ids)]; });"""
WRITE = """const { Model } = await import('./sampler.js'), model = await Model.open(), all = [];
for (const seed of given[0])
  for await (const { tokens } of model.sample({ seed, rows: given[1], source: given[2] })) all.push(tokens);
return all;"""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def run(browser, body, *given):
    answer = browser.execute_async_script(PRELUDE.replace("BODY", body), *given)
    assert not isinstance(answer, str), answer
    return answer


def submit(browser, shown):
    """Press the button; return the text of the element that tells how it ended."""
    wait = WebDriverWait(browser, PATIENCE)
    wait.until(lambda _: browser.find_element(By.CSS_SELECTOR, "form button").is_enabled())
    browser.find_element(By.CSS_SELECTOR, "form button").click()
    return wait.until(lambda _: browser.find_element(By.CSS_SELECTOR, shown).text)


def moments(model, rows, **more):
    """Tokens of all steps, as the browser lists them."""
    seen = []
    for seed in SEEDS:
        model.sample(rows, seed=seed, watch=lambda k, n, t, tokens: seen.append(model.ended(tokens()).tolist()), **more)
    return seen


def translator(tmp_path) -> Model:
    """A micro model of pairs with guidance over the source, whose tokenizer knows French."""
    tokenizer = TRAINED["bpe"]([FRENCH] * 3, 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    sizes = {"data__packing": "padded", "data__source_len": 24, "encoder__depth": 2, "data__vocab_size": tokenizer.vocab_size}
    method = micro_model(**sizes, sampler__source_scale=1.5, sampler__solver="euler")
    return Model(ModelParts(method, method.config, tmp_path, tmp_path / "tokenizer.json", None))


@pytest.mark.slow
def test_a_browser_writes_the_same_tokens(browser, tmp_path):
    browser.set_script_timeout(PATIENCE)
    bundled, pairs = load(None, "cpu"), translator(tmp_path)
    runtime = web.download(tmp_path)
    web.write_web(bundled.parts, tmp_path / "bundled", runtime=runtime)
    with served(tmp_path / "bundled") as address:
        browser.get(address)
        for seed, purpose, rows, count in ((0, "sample", 2, 512), (2**53 - 1, "sde@31", 3, 13)):
            numbers = torch.tensor(run(browser, NUMBERS, seed, purpose, rows, count)).view(rows, count)
            assert torch.allclose(numbers, RowNoise(seed, range(rows)).normal(purpose, count), rtol=1e-5, atol=1e-6)
        for kind in TRAINED:
            tokenizer = TRAINED[kind]([FRENCH] * 3, 300)
            tokenizer.save(tmp_path / kind)
            expected = [[ids := tokenizer.encode(text), tokenizer.decode(ids)] for text in ALL]
            assert run(browser, IDS, (tmp_path / kind).read_text("utf-8"), ALL) == expected
        assert run(browser, WRITE, SEEDS, 2, "") == moments(bundled, 2)
        submit(browser, "#facts")
        assert [item.text for item in browser.find_elements(By.CSS_SELECTOR, ".samples li")] == bundled.generate(4)
        assert browser.get_log("browser") == []

    web.write_web(pairs.parts, tmp_path / "pairs", runtime=runtime)
    source = "Où est mon frère ?"
    with served(tmp_path / "pairs") as address:
        browser.get(address)
        assert run(browser, WRITE, SEEDS, 2, source) == moments(pairs, 2, source=pairs.source_rows([source] * 2))
        for text, shown, words in (
            (FRENCH.replace("\n", " "), "main > .note[role=alert]", "shorten it"),
            (source, "#facts", "computed"),
        ):
            browser.find_element(By.NAME, "source").clear()
            browser.find_element(By.NAME, "source").send_keys(text)
            assert words in submit(browser, shown)
        written = [" ".join(item.text.split()) for item in browser.find_elements(By.CSS_SELECTOR, ".samples li")]
        assert written == pairs.generate(source=source)
        assert browser.get_log("browser") == []


def test_the_folder_is_whole_and_loads_like_other_exported_ones(micro_folders, tmp_path, monkeypatch, capsys):
    model, dist = micro_folders(), tmp_path / "dist"
    dist.mkdir()
    monkeypatch.setattr(web, "RUNTIME", {"ort.js": ("a.mjs", hashlib.sha256(b"js").hexdigest())})
    words = ["export", model, "--format", "web", "--out", tmp_path / "site", "--runtime", dist]
    assert "a.mjs" in refusal(capsys, words, 1)
    (dist / "a.mjs").write_bytes(b"other")
    assert web.VERSION in refusal(capsys, words, 1)
    (dist / "a.mjs").write_bytes(b"js")
    assert "--sampler.grid" in refusal(capsys, [*words, "--sampler.grid", "random"], 2)
    assert "--format web" in refusal(capsys, [*words[:3], "onnx", *words[4:]], 2)
    assert not (tmp_path / "site").exists()
    assert main([*map(str, words), "--sampler.grid", "uniform", "--sampler.steps", "5"]) == 0
    assert str(tmp_path / "site") in capsys.readouterr().out
    grids = json.loads((tmp_path / "site" / "grids.json").read_text())
    assert grids["5"] == torch.linspace(0, 1, 6).tolist() and "32" in grids
    page = (tmp_path / "site" / "index.html").read_text("utf-8")
    assert all((tmp_path / "site" / name).is_file() for name in re.findall(r'(?:src|href)="([^":]+)"', page))
    assert verify_manifest(tmp_path / "site") and len(load(tmp_path / "site").generate(2)) == 2


def test_what_has_no_page_says_why(micro_folders, tmp_path, monkeypatch, capsys):
    words = ["--format", "web", "--out", tmp_path / "site"]
    assert "mdlm" in refusal(capsys, ["export", micro_folders("mdlm"), *words], 2)
    model = load(micro_folders())
    backend = Tokenizer.from_file(str(model.parts.tokenizer))
    backend.normalizer = normalizers.Lowercase()
    backend.save(str(tmp_path / "other.json"))
    with pytest.raises(UsageError, match="'words' and 'bpe'"):
        web.write_web(replace(model.parts, tokenizer=tmp_path / "other.json"), tmp_path / "site")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "--runtime" in refusal(capsys, ["export", micro_folders(), *words], 1)
    (tmp_path / "npm").write_text("#!/bin/sh\necho 'npm error: no such host' >&2; exit 1\n")
    (tmp_path / "npm").chmod(0o755)
    assert "no such host" in refusal(capsys, ["export", micro_folders(), *words], 1)
    assert not (tmp_path / "site").exists()
