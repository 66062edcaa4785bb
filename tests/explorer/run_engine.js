"use strict";
// Runs engine.js on the jobs of test_engine.py, in Node or in a page: casts of formats, casts of recipes, trainings.

const answerJobs = (makeEngine, { tables, casts, specs, layers, trainings }) => {
  const engine = makeEngine(tables), { formats, randomBits, round, encode, floorLog2 } = engine;
  const WORD = new Uint32Array(1), NUMBER = new Float32Array(WORD.buffer), NAN = 0xffffffff;
  // One number for many: each enters times an odd number of its place.
  const digest = (count, at) => {
    let sum = 0;
    for (let i = 0; i < count; i++) sum = (sum + Math.imul(at(i) + 1, Math.imul(2 * i + 1, 0x9E3779B1))) >>> 0;
    return sum;
  };
  const codeOf = (y, format) => y !== y ? NAN : encode(y, format);
  const bitsOf = (y) => { NUMBER[0] = y; return y !== y ? NAN : WORD[0]; };
  // Bits of an FP32 number: near the format's numbers and their midpoints, or any bits at all.
  const bitsFor = (format, value, choice) => {
    if ((choice & 0x70) === 0x70) return value;
    const low = Math.max(0, 125 + format.emin - format.mantissa_bits), span = Math.min(254, 129 + format.emax) - low + 1;
    let mantissa = value & 0x7fffff;
    if (choice & 1) mantissa &= -(2 ** Math.max(0, 22 - format.mantissa_bits));
    if (choice & 2) mantissa ^= 1;
    return ((value & 0x80000000) | ((low + (choice >>> 8) % span) << 23) | mantissa) >>> 0;
  };
  const cast = ({ format, count, words, seed }) => {
    const bits = randomBits(words, 2 * count), draws = seed ? randomBits(seed, count) : null;
    return digest(count, (i) => {
      WORD[0] = bitsFor(formats[format], bits[2 * i], bits[2 * i + 1]);
      const x = Math.abs(NUMBER[0]) === Infinity && formats[format].has_nan ? NaN : NUMBER[0];
      return codeOf(round(x, formats[format], draws ? draws[i] : undefined), formats[format]);
    });
  };
  // A matrix with runs of eight of one size, zeros and a few numbers that are not finite.
  const matrixFor = ({ rows, cols, words, bf16 }) => {
    const data = engine.normals(words, rows * cols), runs = randomBits([words[0], 9], data.length);
    const x = engine.matrix(rows, cols, data.map((v, i) => {
      if (runs[i] >>> 20 === 0xfff) return [0, Infinity, NaN, -Infinity][runs[i] & 3];
      return v * 2 ** (runs[i & -8] % 40 - 20) * (runs[i & -8] >>> 28 === 0 ? 0 : 1);
    }));
    return bf16 ? engine.toBF16(x) : { ...x, dtype: "float32" };
  };
  const specced = (job) => {
    let drawn = 0;
    const q = engine.quantize(matrixFor(job), job.spec, { scale: job.scale, draw: () => job.seeds[drawn++] });
    return [digest(q.data.length, (i) => codeOf(q.data[i], formats[job.spec.format])),
      digest(q.inv.length, (i) => bitsOf(q.inv[i])), q.data.length, drawn];
  };
  const layer = ({ recipe, tensors, seeds }) => {
    let drawn = 0;
    const numbers = ({ rows, cols, words }) => engine.toBF16(engine.matrix(rows, cols, engine.normals(words, rows * cols)));
    const { y, dx, dw } = engine.linear(...tensors.map(numbers), engine.recipes[recipe], () => seeds[drawn++]);
    return [y, dx, dw].map(({ data }) => digest(data.length, (i) => bitsOf(data[i])));
  };
  const train = ({ steps, seeds, ...settings }) => {
    let drawn = 0;
    const training = new engine.Training({ ...settings, draw: seeds && (() => seeds[drawn++]) }), losses = [];
    for (let i = 0; i < steps; i++) losses.push(training.step().loss);
    const weights = training.masters.map(({ data }) => digest(data.length, (i) => bitsOf(data[i])));
    return [losses.map(bitsOf), weights];
  };
  return { casts: casts.map(cast), specs: specs.map(specced), layers: layers.map(layer), trainings: trainings.map(train) };
};
if (typeof require !== "undefined") {
  const [engine, job] = process.argv.slice(2);
  console.log(JSON.stringify(answerJobs(require(engine).makeEngine, JSON.parse(require("fs").readFileSync(job)))));
}
