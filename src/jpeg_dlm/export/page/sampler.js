// Algorithm 2 in a browser: networks in ONNX Runtime Web, and the loop of `jpeg_dlm.flow.sampler` with the same noise.
import * as ort from "./ort.js";
import { normal } from "./noise.js";
import { Tokenizer } from "./tokenizer.js";

ort.env.wasm.numThreads = 1; // threads need headers that a plain file server does not send
ort.env.wasm.wasmPaths = { wasm: new URL("ort.wasm", import.meta.url).href };

async function file(name) {
  const reply = await fetch(new URL(name, import.meta.url));
  if (!reply.ok) throw new Error(`The file ${name} cannot be read (${reply.status}): serve the whole folder.`);
  return reply;
}
const json = async name => (await file(name)).json();

export class Model {
  // Reads everything beside this script.
  static async open() {
    const model = new Model();
    [{ config: model.config }, model.grids] = await Promise.all(["export.json", "grids.json"].map(json));
    model.tokenizer = new Tokenizer(await json("tokenizer.json"));
    model.networks = {};
    model.bytes = 0;
    for (const name of model.config.data.source_len ? ["read", "denoise", "decode"] : ["denoise", "decode"]) {
      const graph = new Uint8Array(await (await file(`${name}.onnx`)).arrayBuffer());
      model.bytes += graph.length;
      model.networks[name] = await ort.InferenceSession.create(graph, { executionProviders: ["wasm"] });
    }
    return model;
  }

  // The only output of a network; arrays of floats become tensors (rows, ...sizes).
  async run(name, rows, inputs) {
    const { latent_len, latent_dim } = this.config.model;
    const sizes = { z: [latent_len, latent_dim], s: [latent_len, latent_dim], present: [this.config.data.source_len] };
    const tensor = (key, value) => new ort.Tensor("float32", value, [rows, ...(sizes[key] || [])]);
    const feeds = Object.entries(inputs).map(([key, value]) => [key, value instanceof Float32Array ? tensor(key, value) : value]);
    return Object.values(await this.networks[name].run(Object.fromEntries(feeds)))[0];
  }

  // What `denoise` is told of a source, the same for all rows.
  async read(source, rows) {
    const size = this.config.data.source_len, ids = Array(rows).fill(this.tokenizer.row(source, size)).flat();
    const present = Float32Array.from(ids, id => Number(id !== this.tokenizer.pad));
    const tokens = new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [rows, size]);
    return { memory: await this.run("read", rows, { source: tokens, present }), present };
  }

  // Yields what the prediction of each step decodes to, the latents as they are, and last the texts themselves.
  async *sample({ seed, rows = 1, steps = this.config.sampler.steps, source = "" }) {
    const { sampler, model: { latent_len, latent_dim } } = this.config, times = this.grids[steps];
    const all = value => new Float32Array(rows).fill(value), w = all(sampler.w);
    const noise = purpose => normal(seed, purpose, rows, latent_len * latent_dim);
    const seen = this.config.data.source_len ? await this.read(source, rows) : {};
    const unseen = seen.memory && sampler.source_scale !== 1 ? { ...seen, present: seen.present.map(() => 0) } : null;

    let z = noise("sample").map(x => sampler.noise_scale * x), s = new Float32Array(z.length);
    for (let k = 0; k < steps; k++) {
      const u = times[k + 1];
      let t = times[k];
      if (sampler.solver === "sde" && u < 1) { // scale z and t by a, and fill up z with fresh noise
        const a = Math.min(1, Math.max(0, 1 - sampler.gamma * (u - t))), fresh = noise(`sde@${k + 1}`);
        z = z.map((x, i) => a * x + (1 - a) * fresh[i]);
        t *= a;
      }
      const given = { z, t: all(t), s, w }; // s: the prediction before
      const x = (await this.run("denoise", rows, { ...given, ...seen })).data;
      const base = unseen && (await this.run("denoise", rows, { ...given, ...unseen })).data;
      s = base ? base.map((value, i) => value + sampler.source_scale * (x[i] - value)) : x;
      yield { step: k, steps, t, latents: z, tokens: await this.decode(s, w) };
      z = z.map((value, i) => value + (u - t) * ((s[i] - value) / (1 - t)));
    }
    yield { step: steps, steps, t: 1, latents: z, tokens: await this.decode(z, w) };
  }

  // Latents as rows of texts, latents and coordinates.
  grid(z) {
    const { latent_len, latent_dim } = this.config.model;
    const cut = (values, size) => Array.from({ length: values.length / size }, (_, i) => values.slice(i * size, (i + 1) * size));
    return cut(cut(z, latent_dim), latent_len);
  }

  // Rows of token ids, with padding behind the first end token where rows end.
  async decode(z, w) {
    const { token_len, packing } = this.config.data, { eos, pad } = this.tokenizer;
    const ids = Array.from((await this.run("decode", w.length, { z, w })).data, Number);
    return Array.from(w, (_, row) => {
      const tokens = ids.slice(row * token_len, (row + 1) * token_len), end = packing === "padded" ? tokens.indexOf(eos) : -1;
      return end < 0 ? tokens : tokens.fill(pad, end + 1);
    });
  }
}
