// node reduce.js transform.safetensors vectors.csv
const fs = require("node:fs");

/** Read a transform that `whiten-index export` wrote. */
function load(path) {
  const file = fs.readFileSync(path);
  const start = 8 + Number(file.readBigUInt64LE(0));
  const header = JSON.parse(file.toString("utf8", 8, start));
  const numbers = (name) => {
    const [from, to] = header[name].data_offsets;
    const found = new Float32Array((to - from) / 4);
    return found.map((_, n) => file.readFloatLE(start + from + 4 * n));
  };
  const facts = header.__metadata__;
  return {
    digest: facts.query_digest,
    unitFirst: facts.normalize_input === "true",
    unitLast: facts.similarity === "cosine",
    matrix: numbers("matrix"), // row by row, of d rows and k columns
    bias: numbers("bias"),
  };
}

function unit(x) {
  const length = Math.hypot(...x);
  return length > 0 ? x.map((number) => number / length) : x;
}

/** Reduce a raw embedding of d numbers to k. */
function reduce(transform, embedding) {
  const { matrix, bias } = transform;
  const k = bias.length;
  if (embedding.length * k !== matrix.length)
    throw new Error(`an embedding has ${matrix.length / k} numbers, not ${embedding.length}`);
  const x = transform.unitFirst ? unit(embedding) : embedding;
  const y = Array.from(bias);
  x.forEach((number, row) => {
    for (let column = 0; column < k; column++) y[column] += number * matrix[row * k + column];
  });
  return transform.unitLast ? unit(y) : y;
}

const transform = load(process.argv[2]);
console.log(transform.digest);
const d = transform.matrix.length / transform.bias.length;
for (const line of fs.readFileSync(process.argv[3], "utf8").trim().split("\n"))
  console.log(reduce(transform, line.split(",").slice(0, d).map(Number)).join(","));
