// The noise of `jpeg_dlm.util.rng`, number for number: BLAKE2b makes a key of an address, Philox makes words of the key, and
// Box and Muller's transform makes normal numbers of the words.
const WORD = (1n << 64n) - 1n, ROUNDS = 10;

// ---------------------------------------------------------------- BLAKE2b (RFC 7693), digests of 8 bytes

const IV = [
  0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
];
const ORDER = [ // of the words of a message in each round, as hexadecimal digits
  "0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8", "905724afe1bc683d",
  "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a", "6fe9b308c2d714a5", "a2847615fb9e3cd0",
].map(row => [...row].map(digit => parseInt(digit, 16)));
const LANES = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15], [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14]];
const turned = (x, bits) => (x >> bits) | ((x << (64n - bits)) & WORD);

// The digest of at most 128 bytes, one block, as a number.
function blake2b(bytes) {
  const block = new Uint8Array(128);
  block.set(bytes);
  const m = new BigUint64Array(block.buffer), first = IV[0] ^ 0x01010008n, v = [first, ...IV.slice(1), ...IV];
  v[12] ^= BigInt(bytes.length);
  v[14] ^= WORD; // the last block
  for (let round = 0; round < 12; round++) {
    LANES.forEach(([a, b, c, d], lane) => {
      for (const [half, right, left] of [[0, 32n, 24n], [1, 16n, 63n]]) {
        v[a] = (v[a] + v[b] + m[ORDER[round % 10][2 * lane + half]]) & WORD;
        v[d] = turned(v[d] ^ v[a], right);
        v[c] = (v[c] + v[d]) & WORD;
        v[b] = turned(v[b] ^ v[c], left);
      }
    });
  }
  return first ^ v[0] ^ v[8];
}

// ---------------------------------------------------------------- Philox4x64-10 (Salmon et al. 2011), as in NumPy

function philox(counter, key) {
  let [x0, x1, x2, x3] = [counter, 0n, 0n, 0n], [k0, k1] = [key, 0n];
  for (let round = 0; round < ROUNDS; round++) {
    const p = x0 * 0xd2e7470ee14c6c93n, q = x2 * 0xca5a826395121157n;
    [x0, x1, x2, x3] = [(q >> 64n) ^ x1 ^ k0, q & WORD, (p >> 64n) ^ x3 ^ k1, p & WORD];
    [k0, k1] = [(k0 + 0x9e3779b97f4a7c15n) & WORD, (k1 + 0xbb67ae8584caa73bn) & WORD];
  }
  return [x0, x1, x2, x3];
}

// `count` standard normal numbers of each row for a purpose of a seed; a row depends only on its number.
export function normal(seed, purpose, rows, count) {
  const key = blake2b(new TextEncoder().encode(`${seed}/${purpose}/0`)) >> 1n, blocks = Math.ceil(count / 8);
  const out = new Float32Array(rows * count), { fround, log, sqrt, cos, sin, PI } = Math; // fp32 after each operation
  for (let row = 0; row < rows; row++) {
    const raw = Array.from({ length: blocks }, (_, i) => philox(BigInt(row * blocks + i + 1), key)).flat();
    const words = new Int32Array(BigUint64Array.from(raw).buffer), half = words.length / 2;
    for (let i = 0; i < half; i++) {
      const uniform = fround(fround(fround(words[i] & 0x7fffffff) + 1) * 2 ** -31);
      const radius = fround(sqrt(fround(-2 * fround(log(uniform)))));
      const angle = fround(fround(words[half + i]) * fround(PI * 2 ** -31));
      if (i < count) out[row * count + i] = radius * fround(cos(angle));
      if (half + i < count) out[row * count + half + i] = radius * fround(sin(angle));
    }
  }
  return out;
}
