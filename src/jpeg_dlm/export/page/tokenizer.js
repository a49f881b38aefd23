// The tokenizers that jpeg-dlm trains: 'words', and 'bpe', whose tokens are pieces of words. Both see a text as bytes.
const SPACES = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/; // those of Python
const WORDS = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^ \p{L}\p{N}]+/gu; // GPT-2's, in text with single spaces
const LISTED = 5; // unknown words that a message names

// The character that stands for each byte in a vocabulary: itself if it can be seen, else one from 256 on.
const isSeen = byte => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
const CHARACTERS = [], BYTES = new Map();
for (let byte = 0, next = 256; byte < 256; byte++) {
  CHARACTERS.push(String.fromCharCode(isSeen(byte) ? byte : next++));
  BYTES.set(CHARACTERS[byte], byte);
}

const collapse = text => text.split(SPACES).filter(Boolean).join(" ").replace(/\p{Surrogate}/gu, "?");

export class Tokenizer {
  constructor({ model, added_tokens }) { // a tokenizer.json
    this.ids = new Map(Object.entries(model.vocab));
    this.tokens = new Map([...this.ids].map(([token, id]) => [id, token]));
    this.specials = new Set(added_tokens.map(token => token.id));
    const pairs = (model.merges || []).map(pair => (Array.isArray(pair) ? pair.join(" ") : pair));
    this.ranks = model.type === "BPE" ? new Map(pairs.map((pair, rank) => [pair, rank])) : null;
    [this.pad, this.eos, this.unknown, this.line] = ["<pad>", "</s>", "<unk>", "<line>"].map(name => this.ids.get(name));
  }

  encode(text) {
    const words = ` ${collapse(text)}`.match(WORDS) || [];
    return words.flatMap(word => {
      const shown = Array.from(new TextEncoder().encode(word), byte => CHARACTERS[byte]);
      return this.ranks ? this.merged(shown).map(piece => this.ids.get(piece)) : [this.ids.get(shown.join("")) ?? this.unknown];
    });
  }

  // Joins the two neighbors that were joined first in training, again and again.
  merged(pieces) {
    for (;;) {
      const ranks = pieces.slice(1).map((piece, i) => this.ranks.get(`${pieces[i]} ${piece}`) ?? Infinity);
      const best = ranks.reduce((least, rank) => Math.min(least, rank), Infinity), at = ranks.indexOf(best);
      if (best === Infinity) return pieces;
      pieces.splice(at, 2, pieces[at] + pieces[at + 1]);
    }
  }

  // The ids of a source in a row of `size`: ended and padded.
  row(text, size) {
    const ids = this.encode(text);
    if (!collapse(text)) throw new Error("The source is empty: give at least one word.");
    if (!this.ranks && ids.includes(this.unknown)) {
      const words = [...new Set(collapse(text).split(" "))].filter(word => this.encode(word).includes(this.unknown));
      const listed = words.slice(0, LISTED).map(word => `'${word}'`).join(", ") + (words.length > LISTED ? " ..." : "");
      throw new Error(`The model's tokenizer does not know ${listed}: use other words.`);
    }
    if (ids.length >= size) throw new Error(`The source has ${ids.length} tokens, the model reads ${size - 1}: shorten it.`);
    return [...ids, this.eos, ...Array(size - ids.length - 1).fill(this.pad)];
  }

  decode(ids) {
    const parts = [[]];
    for (const id of ids) {
      if (id === this.line) parts.push([]);
      else if (!this.specials.has(id)) parts[parts.length - 1].push(...(this.tokens.get(id) || ""));
    }
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    const texts = parts.map(part => collapse(decoder.decode(Uint8Array.from(part, character => BYTES.get(character)))));
    return texts.filter(Boolean).join(" ");
  }
}
