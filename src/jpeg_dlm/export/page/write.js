// The page: it reads the form, runs the sampler and hands each moment to the player.
import { Model } from "./sampler.js";

const PAUSE_MS = 40; // after each step: the browser paints, and eyes can follow
const DRAWN_SEEDS = 1e6;
const find = selector => document.querySelector(selector);
const form = find("form"), fields = form.elements, note = find(".note[role=alert]"), facts = find("#facts"), button = find("form button");
let model = null, running = null;

function tell(error) {
  note.textContent = error.message;
  note.hidden = false;
}

// Makes a run the current one, which ends any other; null: there is none.
function begin(run) {
  running = run;
  button.textContent = run ? "Stop" : "Write";
  form.setAttribute("aria-busy", String(Boolean(run)));
}

async function write(values) {
  const own = {}, player = jpegDlmPlayer.mount(find(".player"), []);
  let computed = 0, begun = performance.now();
  begin(own);
  note.hidden = true;
  facts.textContent = "";
  try {
    for await (const { tokens, latents, ...moment } of model.sample(values)) {
      if (running !== own) return;
      const texts = tokens.map(ids => model.tokenizer.decode(ids));
      computed += performance.now() - begun;
      find(".result").hidden = false;
      player.add({ ...moment, texts, latents: model.grid(latents) });
      await new Promise(resolve => setTimeout(resolve, PAUSE_MS));
      begun = performance.now();
    }
    if (running === own) facts.textContent = `computed in ${(computed / 1000).toFixed(2)} s`;
  } catch (error) {
    find(".result").hidden = true;
    tell(error);
  }
  if (running === own) begin(null);
}

form.addEventListener("submit", event => {
  event.preventDefault();
  if (running && event.submitter === button) return begin(null);
  const { source, ...numbers } = Object.fromEntries(new FormData(form));
  history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
  write({ source, ...Object.fromEntries(Object.entries(numbers).map(([name, value]) => [name, Number(value)])) });
});
find(".another").addEventListener("click", () => {
  fields.seed.value = String(Math.floor(Math.random() * DRAWN_SEEDS));
  form.requestSubmit();
});

// The address holds the values of the form, so that it repeats what it shows.
function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of wanted) if (fields[name]) fields[name].value = value;
  if (wanted.has("seed")) form.requestSubmit();
}

try {
  model = await Model.open();
  const { data, model: { latent_len }, sampler } = model.config, pairs = data.source_len > 0;
  fields.source.parentElement.hidden = !pairs;
  fields.source.required = pairs;
  fields.rows.value = pairs ? "1" : "4";
  fields.steps.replaceChildren(...Object.keys(model.grids).map(steps => new Option(steps, steps)));
  fields.steps.value = String(sampler.steps);
  const task = pairs ? "turns a source into a target" : "writes texts", size = (model.bytes / 1e6).toFixed(0);
  find("#about").textContent = `JPEG-DLM (${size} MB) ${task} of up to ${data.token_len} tokens, through ${latent_len} latents.`;
  for (const one of form.querySelectorAll("button")) one.disabled = false;
  addEventListener("hashchange", follow);
  follow();
} catch (error) {
  tell(error);
}
