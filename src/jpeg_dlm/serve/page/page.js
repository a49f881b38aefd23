// The page of the service: forms, the answers to them, and links that make the same requests again.
"use strict";
(() => {
  const POINTS = 17, VARIATIONS = 4, DRAWN_SEEDS = 1e6;
  const find = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, name, text) => Object.assign(document.createElement(tag), { className: name || "", textContent: text || "" });
  let models = [], key = sessionStorage.getItem("key") || "";

  // ---------------------------------------------------------------- the server

  async function send(path, body, signal) {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const options = { headers, signal };
    if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    if (body) headers["Content-Type"] = "application/json";
    let reply;
    try {
      reply = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer: check that it still runs.");
    }
    if (reply.ok) return reply;
    const told = await reply.json().catch(() => ({}));
    const error = new Error(told.error ? told.error.message : `The server answered with ${reply.status}.`);
    error.status = reply.status;
    throw error;
  }
  const ask = async (path, body, signal) => (await send(path, body, signal)).json();

  async function* events(path, body, signal) {
    const reader = (await send(path, { ...body, stream: true }, signal)).body.getReader(), decoder = new TextDecoder();
    for (let rest = ""; ;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("The server ended its answer too early.");
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const found = JSON.parse(data);
        if (found.error) throw new Error(found.error.message);
        yield found;
      }
    }
  }

  // ---------------------------------------------------------------- forms

  function values(form) {
    const found = {};
    for (const field of form.elements) {
      if (!field.name || field.disabled || field.closest("[hidden]") || field.value === "") continue;
      found[field.name] = field.type === "number" || field.type === "range" ? Number(field.value) : field.value;
    }
    return found;
  }

  function fill(form, wanted) {
    for (const field of form.elements) {
      if (!field.name) continue;
      if (wanted.has(field.name)) field.value = wanted.get(field.name);
      else if (field.tagName === "SELECT") field.selectedIndex = 0;
      else field.value = field.defaultValue;
      field.dispatchEvent(new Event("change"));
      field.dispatchEvent(new Event("input"));
    }
  }

  const linkOf = (section, found) => `#${section.id}?${new URLSearchParams(found)}`;
  const drawSeed = () => Math.floor(Math.random() * DRAWN_SEEDS);

  // Runs `act` when a form is sent, and tells errors in words. A run that is replaced is stopped.
  function onSubmit(section, act) {
    const form = find("form", section), note = find(".note", section), result = find(".result", section);
    const button = find("button", form), label = button.textContent, link = find(".link", form);
    let running = null;
    form.addEventListener("submit", async event => {
      event.preventDefault();
      if (running) {
        running.abort();
        if (event.submitter === button && button.textContent === "Stop") return;
      }
      const own = running = new AbortController(), seed = form.elements.seed;
      if (seed && seed.value === "") seed.value = String(drawSeed());
      const found = values(form);
      history.replaceState(null, "", linkOf(section, found));
      note.hidden = true;
      button.textContent = "Stop";
      section.setAttribute("aria-busy", "true");
      try {
        await act(found, own.signal, result);
      } catch (error) {
        if (error.name !== "AbortError" && running === own) {
          if (error.status) result.hidden = true; // refused, so that there is nothing to show
          note.textContent = error.message;
          note.hidden = false;
        }
        own.abort(); // the other parts of the same request
      }
      if (running !== own) return;
      running = null;
      button.textContent = label;
      section.removeAttribute("aria-busy");
    });
    link.addEventListener("click", async () => {
      const address = new URL(linkOf(section, values(form)), location.href).href;
      history.replaceState(null, "", address);
      try {
        await navigator.clipboard.writeText(address);
        link.textContent = "Copied";
      } catch {
        link.textContent = "See the address bar";
      }
      setTimeout(() => { link.textContent = "Copy link"; }, 1500);
    });
  }

  // ---------------------------------------------------------------- write

  // The fields of a request that this model understands.
  function understood(model, found) {
    const body = { model: model.id, seed: found.seed };
    for (const name of Object.keys(model.options)) if (found[name] !== undefined) body[name] = found[name];
    for (const name of ["prompt", "source"]) if (found[name] && model.can[name]) body[name] = found[name];
    return body;
  }

  async function watch(model, found, signal, stage) {
    const column = make("div"), root = make("div", "player"), list = make("ol", "samples");
    const latents = model.latents ? `, ${model.latents} latents for ${model.tokens} tokens` : `, ${model.tokens} tokens`;
    column.append(make("h3", "", model.id), make("p", "", model.title + latents), root);
    list.start = 0;
    root.append(list);
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", `Text of ${model.id} at each step`);
    stage.append(column);
    const player = jpegDlmPlayer.mount(root, []);
    for await (const moment of events("v1/trajectory", understood(model, found), signal)) if (moment.texts) player.add(moment);
  }

  async function list(model, found, signal, into) {
    const body = { ...understood(model, found), n: found.n, echo: true };
    if (found.max_tokens) body.max_tokens = found.max_tokens;
    const items = Array.from({ length: found.n }, () => Object.assign(make("li", "", "…"), { dir: "auto" }));
    into.replaceChildren(...items);
    for await (const part of events("v1/completions", body, signal)) {
      for (const choice of part.choices) items[choice.index].textContent = choice.text || "(empty)";
    }
  }

  async function write(found, signal, result) {
    const chosen = models.find(model => model.id === found.model), beside = models.find(model => model.id === found.beside);
    const stage = find(".stage", result);
    stage.replaceChildren();
    result.hidden = false;
    const watched = [chosen, beside].filter(Boolean).map(model => watch(model, found, signal, stage));
    await Promise.all([...watched, list(chosen, found, signal, find(".texts", result))]);
  }

  // ---------------------------------------------------------------- the codec

  const able = what => models.find(model => model.id === find("#write [name=model]").value && model.can[what])
    || models.find(model => model.can[what]);

  async function reconstruct(found, signal, result) {
    const answer = await ask("v1/reconstruct", { model: able("reconstruct").id, input: found.input }, signal);
    const one = answer.data[0];
    for (const [side, mark] of [["before", "lost"], ["after", "new"]]) {
      find(`.${side}`, result).replaceChildren(...one[side].map(piece => make("span", piece.kept ? "" : mark, piece.text)));
    }
    find(".kept", result).textContent =
      `${one.kept} of ${one.of} tokens kept, through ${answer.latents} latents for every ${answer.tokens} tokens.`;
    result.hidden = false;
  }

  async function interpolate(found, signal, result) {
    const body = { model: able("interpolate").id, first: found.first, second: found.second, points: POINTS };
    const points = (await ask("v1/interpolate", body, signal)).data, slider = find("[name=position]", result);
    const show = () => {
      const point = points[Number(slider.value)];
      find(".point", result).textContent = point.text;
      find("output", result).textContent = point.position.toFixed(2);
    };
    slider.max = String(points.length - 1);
    slider.value = String((points.length - 1) / 2);
    slider.oninput = show;
    show();
    result.hidden = false;
  }

  async function edit(found, signal, result) {
    const body = { model: able("edit").id, input: found.input, noise: found.noise, seed: found.seed, n: VARIATIONS };
    const answer = await ask("v1/edit", body, signal);
    find(".texts", result).replaceChildren(...answer.data.map(one => Object.assign(make("li", "", one.text), { dir: "auto" })));
    result.hidden = false;
  }

  // ---------------------------------------------------------------- beginning

  function offer() {
    const form = find("#write form"), [first, second] = ["model", "beside"].map(name => form.elements[name]);
    const option = model => new Option(model.id, model.id);
    first.replaceChildren(...models.map(option));
    second.replaceChildren(new Option("nothing", ""), ...models.map(option));
    find(".needs-two", form).hidden = models.length < 2;
    for (const what of ["reconstruct", "interpolate", "edit"]) {
      for (const node of all(`.needs-${what}`)) node.hidden = !models.some(model => model.can[what]);
    }
    const adapt = () => {
      const chosen = [first, second].map(field => models.find(model => model.id === field.value)).filter(Boolean);
      for (const label of all("[data-option]", form)) {
        const having = chosen.find(model => label.dataset.option in model.options);
        label.hidden = !having;
        if (having) find("input", label).placeholder = String(having.options[label.dataset.option]);
      }
      for (const label of all("[data-needs]", form)) {
        const having = chosen.some(model => model.can[label.dataset.needs]), field = find("input", label);
        field.disabled = !having;
        if (label.dataset.needs === "prompt") {
          label.hidden = chosen.every(model => model.can.source);
          field.placeholder = having ? "how the text begins" : `${chosen[0].title} here writes whole texts, without a prompt`;
        } else label.hidden = !having;
      }
    };
    for (const field of [first, second]) field.addEventListener("change", adapt);
    adapt();
    find("#about").textContent = models.length === 1
      ? `${models[0].title}, served as “${models[0].id}”: up to ${models[0].tokens} tokens${models[0].latents ? ` in ${models[0].latents} latents` : ""}.`
      : `${models.length} models: ${models.map(model => `${model.id} (${model.title})`).join(", ")}.`;
  }

  // A link has the name of a section and the values of its fields.
  function follow() {
    const [name, query] = location.hash.slice(1).split("?"), section = query && document.getElementById(name);
    if (!section || section.hidden) return;
    const form = find("form", section);
    fill(form, new URLSearchParams(query));
    section.scrollIntoView();
    form.requestSubmit();
  }

  async function begin() {
    const failure = find("#failure"), access = find("#access");
    try {
      models = (await ask("v1/models")).data;
    } catch (error) {
      access.hidden = error.status !== 401;
      failure.textContent = error.message;
      failure.hidden = error.status === 401 && !key;
      return;
    }
    access.hidden = failure.hidden = true;
    offer();
    follow();
  }

  find("#access").addEventListener("submit", event => {
    event.preventDefault();
    key = event.target.elements.key.value;
    sessionStorage.setItem("key", key);
    begin();
  });
  find(".another").addEventListener("click", () => {
    const form = find("#write form");
    form.elements.seed.value = String(drawSeed());
    form.requestSubmit();
  });
  for (const slider of all("#edit [type=range]")) {
    slider.addEventListener("input", () => { find("#edit output").textContent = Number(slider.value).toFixed(2); });
  }
  for (const [name, act] of Object.entries({ write, reconstruct, interpolate, edit })) onSubmit(document.getElementById(name), act);
  addEventListener("hashchange", follow);
  begin();
})();
