"use strict";
// The engine's numerics: casts, scales, GEMMs and a small training, bit for bit. Formats, rules and recipes come from
// `tables`, which Python writes; here are only the steps. `fp32(...)` is one rounding to FP32; other sums are in FP64,
// as in numerics/rounding.py and numerics/scaling.py, whose names these functions bear. No other file is needed: Node
// runs this one in the tests.
//
// A matrix is {rows, cols, data: Float32Array}, row by row. Sums of a GEMM run along k from 0 up; each product and each
// sum is rounded to FP32. torch leaves that order open; all else has the bits of ottava.quantize.

const makeEngine = (tables) => {
  const fp32 = Math.fround, { formats, recipes, rules } = tables;
  const FP32_MAX = formats.FP32.max, { E4M3, E2M1, E8M0, BF16 } = formats;
  const F64 = new Float64Array(1), WORDS = new Uint32Array(F64.buffer);

  // --- numbers -------------------------------------------------------------------------------------------------------

  const floorLog2 = (x) => { F64[0] = x; return ((WORDS[1] >>> 20) & 0x7ff) - 1023; };
  const powerOfTwo = (e) => { WORDS[0] = 0; WORDS[1] = (e + 1023) << 20; return F64[0]; };
  const exponentOf = (x, format) => Math.min(format.emax, Math.max(format.emin, floorLog2(x)));

  // The nearest number of a format, a tie to even; or up with 32 random bits. An infinity saturates.
  function round(x, format, random) {
    if (x !== x) return format.has_nan ? NaN : format.max;
    const quantum = powerOfTwo(exponentOf(x, format) - format.mantissa_bits), steps = Math.abs(x) / quantum;
    let whole = Math.floor(random === undefined ? steps : steps + (random >>> 8) * 2 ** -24);
    if (random === undefined) {
      const rest = steps - whole;
      if (rest > 0.5 || (rest === 0.5 && whole % 2 === 1)) whole++;
    }
    const size = Math.min(whole * quantum, format.max), negative = x < 0 || Object.is(x, -0);
    const y = Math.max(negative ? -size : size, format.lowest);
    return format.specials === "fnuz" ? y + 0 : y;
  }
  // The code of a number of the format.
  function encode(y, format) {
    if (y !== y) return format.specials === "fnuz" ? 2 ** (format.bits - 1) : 2 ** (format.bits - Number(format.signed)) - 1;
    const exponent = exponentOf(y, format), implied = format.has_zero ? 0 : 2 ** format.mantissa_bits;
    const significand = Math.abs(y) * powerOfTwo(format.mantissa_bits - exponent);
    const size = (exponent - format.emin) * 2 ** format.mantissa_bits + significand - implied;
    return size + (y < 0 || Object.is(y, -0) ? 2 ** (format.bits - 1) : 0);
  }
  // The number of a code, by the definition of the format.
  function decode(code, format) {
    const half = 2 ** (format.bits - Number(format.signed)), negative = format.signed && code >= half, size = code % half;
    if (format.specials === "fnuz" && code === half) return NaN;
    const field = Math.floor(size / 2 ** format.mantissa_bits), mantissa = size % 2 ** format.mantissa_bits;
    const top = field === 2 ** format.exponent_bits - 1, sign = negative ? -1 : 1;
    if (format.specials === "ieee" && top) return mantissa ? NaN : sign * Infinity;
    if (format.specials === "fn" && top && mantissa === 2 ** format.mantissa_bits - 1) return NaN;
    if (field === 0 && format.has_zero) return sign * mantissa * format.min_subnormal;
    return sign * (1 + mantissa * format.eps) * powerOfTwo(field - format.bias);
  }

  // --- random bits: Philox4x32-10, counted by place -----------------------------------------------------------------------

  function high(a, b) {  // of the 64 bits of a product
    const al = a & 0xffff, ah = a >>> 16, bl = b & 0xffff, bh = b >>> 16;
    const middle = ah * bl + ((al * bl) >>> 16), other = al * bh + (middle & 0xffff);
    return (ah * bh + (middle >>> 16) + (other >>> 16)) >>> 0;
  }
  // 32 bits for each of `count` elements; a seed is its two words, the low one first.
  function randomBits(seed, count, start = 0) {
    const found = new Uint32Array(count);
    for (let at = Math.floor(start / 4); at * 4 < start + count; at++) {
      let [a, b, c, d] = [at >>> 0, Math.floor(at / 2 ** 32), 0, 0], [first, second] = seed;
      for (let i = 0; i < 10; i++) {
        const lowA = Math.imul(a, 0xD2511F53) >>> 0, highA = high(a, 0xD2511F53);
        const lowC = Math.imul(c, 0xCD9E8D57) >>> 0, highC = high(c, 0xCD9E8D57);
        [a, b, c, d] = [(highC ^ b ^ first) >>> 0, lowC, (highA ^ d ^ second) >>> 0, lowA];
        first = (first + 0x9E3779B9) >>> 0;
        second = (second + 0xBB67AE85) >>> 0;
      }
      [a, b, c, d].forEach((word, i) => { if (at * 4 + i >= start) found[at * 4 + i - start] = word; });
    }
    return found;
  }
  // A sum of four even numbers for a normal one, the same on every machine: variance 1, at most 2 sqrt(3).
  function normals(seed, count, start = 0) {
    const bits = randomBits(seed, 4 * count, 4 * start), found = new Float32Array(count), root = Math.sqrt(3);
    for (let i = 0; i < count; i++) {
      let sum = -2;
      for (let j = 4 * i; j < 4 * i + 4; j++) sum += (bits[j] >>> 8) * 2 ** -24;
      found[i] = fp32(sum * root);
    }
    return found;
  }

  // --- matrices and blocks ------------------------------------------------------------------------------------------------

  const matrix = (rows, cols, data = new Float32Array(rows * cols)) => ({ rows, cols, data });
  const mapped = (x, change) => matrix(x.rows, x.cols, x.data.map(change));
  // As torch's own cast to BF16: what is too large becomes an infinity.
  const UNBOUNDED = { ...BF16, max: Infinity, lowest: -Infinity };
  const toBF16 = (x) => mapped(x, (v) => Math.abs(v) === Infinity ? v : round(v, UNBOUNDED));
  function transpose(x) {
    const y = matrix(x.cols, x.rows);
    for (let i = 0; i < x.rows; i++) for (let j = 0; j < x.cols; j++) y.data[j * x.rows + i] = x.data[i * x.cols + j];
    return y;
  }
  // The blocks of a matrix: their size, their number, and the block of each element.
  function gridOf(x, { rows, cols }) {
    const high = rows ?? Math.max(x.rows, 1), wide = cols ?? Math.max(x.cols, 1);
    const across = cols === null ? 1 : Math.ceil(x.cols / wide), down = rows === null ? 1 : Math.ceil(x.rows / high);
    return { high, wide, across, down, count: across * down, of: (i, j) => Math.floor(i / high) * across + Math.floor(j / wide) };
  }
  function eachElement(x, grid, visit) {
    for (let i = 0; i < x.rows; i++) {
      for (let j = 0; j < x.cols; j++) visit(i * x.cols + j, grid.of(i, j));
    }
  }
  function amaxOf(x, grid) {
    const found = new Float32Array(grid.count);
    eachElement(x, grid, (i, block) => {
      const size = Math.abs(x.data[i]);
      if (size > found[block] || size !== size) found[block] = size;  // a NaN stays
    });
    return found;
  }
  // The last half is added to the first until one number is left.
  function folded(numbers, rounded = (v) => v) {
    let count = numbers.length;
    while (count > 1) {
      const half = count >> 1;
      for (let i = 0; i < half; i++) numbers[i] = rounded(numbers[i] + numbers[count - half + i]);
      count -= half;
    }
    return numbers[0];
  }
  // The numbers of each block, row by row, with zeros for what a ragged block lacks.
  function inBlocks(x, grid, values) {
    const found = Array.from({ length: grid.count }, () => new Float64Array(grid.high * grid.wide));
    for (let i = 0; i < x.rows; i++) {
      for (let j = 0; j < x.cols; j++) found[grid.of(i, j)][(i % grid.high) * grid.wide + j % grid.wide] = values[i * x.cols + j];
    }
    return found;
  }

  // --- scales: numerics/scaling.py ------------------------------------------------------------------------------------------

  const usable = (amax) => amax > 0 && amax < Infinity;
  const largestOf = (amaxes) => amaxes.reduce((top, amax) => usable(amax) && amax > top ? amax : top, 0);
  const reciprocal = (x) => fp32(1 / x);
  const capped = (x) => Math.min(x, FP32_MAX);

  // The factors of blocks {scale, inv} from their amaxes.
  function computeScale(amaxes, spec) {
    const format = formats[spec.format], scale = new Float32Array(amaxes.length).fill(1), inv = scale.slice();
    if (spec.scale_format === "e4m3") twoLevelScale(amaxes, format, spec.margin, scale, inv);
    else amaxes.forEach((amax, i) => {
      if (!usable(amax)) return;
      if (spec.scale_format.startsWith("e8m0")) {
        const size = amax * powerOfTwo(spec.margin);
        let exponent = floorLog2(size) - format.emax;
        if (spec.scale_format === "e8m0" && size * powerOfTwo(-exponent) > format.max) exponent++;
        inv[i] = powerOfTwo(Math.min(E8M0.emax, Math.max(E8M0.emin, exponent)));
        scale[i] = reciprocal(inv[i]);
        return;
      }
      scale[i] = capped(fp32(fp32(format.max * powerOfTwo(-spec.margin)) / amax));
      if (spec.scale_format === "pow2") scale[i] = powerOfTwo(floorLog2(scale[i]));
      inv[i] = reciprocal(scale[i]);
    });
    return withNaN({ scale, inv }, amaxes, format);
  }
  // A format without NaN: the scale of the block has it.
  function withNaN(factors, amaxes, format) {
    if (!format.has_nan) amaxes.forEach((amax, i) => { if (!(amax < Infinity)) factors.inv[i] = NaN; });
    return factors;
  }
  function twoLevelScale(amaxes, format, margin, scale, inv) {
    const top = format.max * powerOfTwo(-margin), largest = largestOf(amaxes);
    const tensor = largest > 0 ? capped(fp32(fp32(E4M3.max * top) / largest)) : 1, perBlock = fp32(tensor * fp32(1 / top));
    amaxes.forEach((amax, i) => {
      if (!usable(amax)) return;
      inv[i] = fp32(round(capped(fp32(amax * perBlock)), E4M3) * reciprocal(tensor));
      scale[i] = capped(reciprocal(inv[i]));
    });
  }
  // NVFP4 by other rules: 1 / t for the tensor, and the nearest E4M3 scales that bring the blocks to `top`.
  const tensorScale = (amaxes, top) => capped(fp32(fp32(top) / largestOf(amaxes)));
  const nearestScales = (amaxes, tensor, top) => amaxes.map((amax) => round(capped(fp32(amax * fp32(tensor / fp32(top)))), E4M3));
  function factorsOf(block, tensor, amaxes) {
    const inv = block.map((s) => fp32(s * reciprocal(tensor))), scale = inv.map((s) => capped(reciprocal(s)));
    amaxes.forEach((amax, i) => { if (!usable(amax)) scale[i] = inv[i] = 1; });
    return withNaN({ scale, inv }, amaxes, E2M1);
  }
  // Of two candidates {factors, errors}, the second where its error is smaller.
  function better([one, other]) {
    other.errors.forEach((error, i) => {
      if (error < one.errors[i]) [one.factors.scale[i], one.factors.inv[i]] = [other.factors.scale[i], other.factors.inv[i]];
    });
    return one.factors;
  }
  const blockScales = {
    four_over_six(x, amaxes, grid) {
      const tensor = tensorScale(amaxes, rules.four_over_six.tensor);
      return better(rules.four_over_six.tops.map((top) => {
        const factors = factorsOf(nearestScales(amaxes, tensor, top), tensor, amaxes), squares = new Float64Array(x.data.length);
        eachElement(x, grid, (i, b) => {
          squares[i] = fp32(fp32(round(fp32(x.data[i] * factors.scale[b]), E2M1) * factors.inv[b]) - x.data[i]) ** 2;
        });
        return { factors, errors: inBlocks(x, grid, squares).map((block) => folded(block)) };
      }));
    },
    ms_eden(x, amaxes, grid, group, draw) {
      const tensor = tensorScale(amaxes, rules.ms_eden.tensor), per = group / grid.wide;
      const block = nearestScales(amaxes, tensor, rules.ms_eden.tops[0]).map((s) => s > 0 ? s : 1);
      const factors = factorsOf(block, tensor, amaxes), groups = gridOf(x, { rows: 1, cols: group });
      const squares = new Float64Array(x.data.length), products = squares.slice();
      eachElement(x, grid, (i, b) => {
        const z = fp32(x.data[i] * factors.scale[b]);
        squares[i] = z * z;
        products[i] = z * round(z, E2M1);
      });
      const [length, overlap] = [squares, products].map((values) => inBlocks(x, groups, values).map((one) => folded(one)));
      const bits = randomBits(draw(), grid.count);
      block.forEach((s, i) => {
        const at = Math.floor(i / grid.across) * groups.across + Math.floor(i % grid.across / per);
        const correction = overlap[at] > 0 ? fp32(length[at] / overlap[at]) : 1;
        const stored = round(fp32(s * correction), E4M3, bits[i]);
        if (usable(amaxes[i])) factors.inv[i] = fp32(stored * reciprocal(tensor));
      });
      return factors;
    },
  };
  for (const [name, [bound, mode]] of Object.entries(rules.te_four_over_six)) {
    blockScales[name] = (x, amaxes, grid) => {
      const largest = largestOf(amaxes), top = bound * E2M1.max, tensor = tensorScale(amaxes, top);
      const base = amaxes.map((amax) => fp32(fp32(amax / E2M1.max) * tensor));
      return better([1, 1.5].map((wider) => {
        const block = base.map((s) => round(Math.min(fp32(s * wider), E4M3.max), E4M3));
        const factors = factorsOf(block, tensor, amaxes), errors = new Float64Array(x.data.length);
        eachElement(x, grid, (i, b) => {
          const value = fp32(fp32(round(fp32(x.data[i] * factors.scale[b]), E2M1) * block[b]) * largest);
          const error = fp32(fp32(value / fp32(top)) - x.data[i]);
          errors[i] = mode === "MAE" ? Math.abs(error) : fp32(error * error);
        });
        const lines = inBlocks(x, grid, errors).map((one) => Array.from({ length: grid.high }, (_, row) =>
          one.subarray(row * grid.wide, (row + 1) * grid.wide).reduce((sum, error) => fp32(sum + error))));
        return { factors, errors: lines.map((line) => folded(line, fp32)) };
      }));
    };
  }

  // --- transforms before a cast: numerics/transforms.py -----------------------------------------------------------------------

  const signsOf = (aside, size) => aside ? Array.from(randomBits(aside, size), (word) => 1 - 2 * (word & 1)) : rules.nvidia_signs;
  function butterflies(group) {
    for (let apart = 1; apart < group.length; apart *= 2) {
      for (let j = 0; j < group.length; j++) {
        if (!(j & apart)) [group[j], group[j + apart]] = [group[j] + group[j + apart], group[j] - group[j + apart]];
      }
    }
  }
  function transformed(x, { kind, size, signs, rounded, tokens }, beside, draw) {
    if (kind === "mean") {
      const rows = tokens === "rows", aside = new Float32Array(rows ? x.cols : x.rows), sums = new Float64Array(aside.length);
      const along = (i) => rows ? i % x.cols : Math.floor(i / x.cols);
      x.data.forEach((v, i) => { sums[along(i)] += v; });
      sums.forEach((sum, i) => { aside[i] = Number.isFinite(fp32(sum / (rows ? x.rows : x.cols))) ? fp32(sum / (rows ? x.rows : x.cols)) : 0; });
      return { y: mapped(x, (v, i) => fp32(v - aside[along(i)])), aside };
    }
    const aside = signs === "fresh" ? beside?.aside ?? draw() : null, wide = Math.ceil(x.cols / size) * size;
    const y = matrix(x.rows, wide), group = new Float64Array(size), factor = 1 / Math.sqrt(size), sign = signsOf(aside, size);
    for (let start = 0; start < x.rows * wide; start += size) {
      const row = Math.floor(start / wide), first = start % wide;
      for (let j = 0; j < size; j++) group[j] = (first + j < x.cols ? x.data[row * x.cols + first + j] : 0) * sign[j];
      butterflies(group);
      for (let j = 0; j < size; j++) y.data[start + j] = group[j] * factor + 0;
    }
    return { y: rounded && x.dtype !== "float32" ? toBF16(y) : y, aside };
  }

  // --- casts and GEMMs ------------------------------------------------------------------------------------------------------

  // Casts a matrix. scale: predicted, 0 for none; beside: the operand it meets; draw(): the next seed, two words.
  // x.dtype "float32" keeps what a rotation makes in FP32; others are BF16.
  function quantize(x, spec, { scale = null, beside = null, draw = null } = {}) {
    const format = formats[spec.format], { y, aside } = spec.transform ? transformed(x, spec.transform, beside, draw) : { y: x, aside: null };
    const grid = gridOf(y, spec), amax = amaxOf(y, grid);
    const factors = spec.block_scale !== "amax" ? blockScales[spec.block_scale](y, amax, grid, spec.transform?.size, draw)
      : predicted(computeScale(amax, spec), amax, spec, scale);
    const bits = spec.rounding === "stochastic" ? randomBits(draw(), y.data.length) : null, data = new Float32Array(y.data.length);
    for (let i = 0, at = 0; i < y.rows; i++) {
      for (let j = 0; j < y.cols; j++, at++) {
        const v = y.data[at], kept = format.has_nan && Math.abs(v) === Infinity ? NaN : v;
        data[at] = round(fp32(kept * factors.scale[grid.of(i, j)]), format, bits ? bits[at] : undefined);
      }
    }
    return { rows: y.rows, cols: y.cols, data, spec, grid, amax, scale: factors.scale, inv: factors.inv, aside, cast: y };
  }
  // A scale from a history stands, unless it is guarded and would clip or waste octaves.
  function predicted(current, amax, spec, scale) {
    if (!(scale > 0)) return current;
    const top = fp32(amax[0] * scale), max = formats[spec.format].max;
    const inside = (top <= max && top >= fp32(max * 2 ** -spec.guard_bits)) || amax[0] === 0;
    if (spec.scaling === "guarded" && !inside) return current;
    return withNaN({ scale: Float32Array.of(scale), inv: Float32Array.of(reciprocal(scale)) }, amax, formats[spec.format]);
  }
  // The next scale of a window of amaxes, newest first; 0 where there is none.
  function fromWindow(history, spec) {
    const amax = spec.amax_compute_algo === "max" ? Math.max(0, ...history) : history[0] ?? 0;
    return usable(amax) ? computeScale(Float32Array.of(amax), spec).scale[0] : 0;
  }
  function dequantize(q) {
    if (!q.spec) return q;
    return matrix(q.rows, q.cols, q.data.map((v, i) => fp32(v * q.inv[q.grid.of(Math.floor(i / q.cols), i % q.cols)])));
  }
  // What a cast has left of x (rows, cols): decoded, rotated back, with its mean. FP32.
  function recovered(q, { rows, cols }) {
    const { data } = dequantize(q), { kind, size, tokens } = q.spec?.transform ?? {}, y = matrix(rows, cols, data.slice(0, rows * cols));
    if (kind === "mean") return mapped(y, (v, i) => v + q.aside[tokens === "rows" ? i % cols : Math.floor(i / cols)]);
    if (kind !== "hadamard") return y;
    const sign = signsOf(q.aside, size);
    for (let start = 0; start < data.length; start += size) {
      const group = Float64Array.from(data.subarray(start, start + size)), row = Math.floor(start / q.cols), first = start % q.cols;
      butterflies(group);
      for (let j = 0; j < size && first + j < cols; j++) y.data[row * cols + first + j] = group[j] / Math.sqrt(size) * sign[j];
    }
    return y;
  }

  // Sums along k, from `start` to `stop`: the order that a GEMM here has.
  function sum(a, b, i, j, start, stop) {
    let total = fp32(0);
    for (let k = start; k < stop; k++) total = fp32(total + fp32(a.data[i * a.cols + k] * b.data[j * b.cols + k]));
    return total;
  }
  // y (M, N) = a (M, K) b (N, K).T in FP32: kernels/reference.py with sums in that order.
  function multiply(a, b) {
    const y = matrix(a.rows, b.rows), k = a.cols, coded = a.spec && b.spec;
    const one = coded && a.grid.across === 1 && b.grid.across === 1;
    if (!one && !(coded && [a, b].some((q) => q.spec.scale_format === "fp32"))) {  // scales go into the operands
      const [left, right] = [dequantize(a), dequantize(b)];
      for (let i = 0; i < a.rows; i++) for (let j = 0; j < b.rows; j++) y.data[i * b.rows + j] = sum(left, right, i, j, 0, k);
      return y;
    }
    const inner = [a, b].map((q) => q.spec.cols).filter((cols) => cols && cols < k);
    const step = one || !inner.length ? k : inner.reduce(gcd);
    for (let i = 0; i < a.rows; i++) {
      for (let j = 0; j < b.rows; j++) {
        let total = fp32(0);
        for (let start = 0; start < k; start += step) {
          const part = fp32(sum(a, b, i, j, start, Math.min(start + step, k)) * a.inv[a.grid.of(i, start)]);
          total = fp32(total + fp32(part * b.inv[b.grid.of(j, start)]));
        }
        y.data[i * b.rows + j] = total;
      }
    }
    return y;
  }
  const gcd = (a, b) => b ? gcd(b, a % b) : a;

  // The product with the means that were set aside, in FP32; then one rounding to BF16.
  function gemm(a, b) {
    const y = multiply(a, b), kinds = [a, b].map((q) => q.spec?.transform?.kind === "mean" ? q.spec.transform.tokens : "");
    if (kinds[0] === "columns" && kinds[1] === "columns") {
      y.data.forEach((v, at) => {
        const [i, j] = [Math.floor(at / y.cols), at % y.cols];
        y.data[at] = fp32(v + fp32(fp32(a.aside[i] * a.cols) * b.aside[j]));
      });
    } else if (kinds[0] === "rows") {
      const part = multiply(matrix(1, a.cols, a.aside), dequantize(b));
      y.data.forEach((v, at) => { y.data[at] = fp32(v + part.data[at % y.cols]); });
    }
    return toBF16(y);
  }

  // --- a linear layer -------------------------------------------------------------------------------------------------------

  // The six casts of a layer in the order of the engine. `scales`: predicted ones by tensor. null: high precision.
  function castForward(x, w, recipe, draw, scales = {}) {
    const cast = (operand, spec, tensor, beside = null) => spec ? quantize(operand, spec, { scale: scales[tensor], beside, draw }) : operand;
    const { fprop, dgrad, wgrad } = recipe, xRow = cast(x, fprop.lhs, "input"), xCol = cast(transpose(x), wgrad.rhs, "input");
    return { xRow, xCol, wRow: cast(w, fprop.rhs, "weight", xRow), wCol: cast(transpose(w), dgrad.rhs, "weight") };
  }
  function castBackward(dy, { wCol, xCol }, recipe, draw, scales = {}) {
    const cast = (operand, spec, beside) => spec ? quantize(operand, spec, { scale: scales.grad_output, beside, draw }) : operand;
    return { dyRow: cast(dy, recipe.dgrad.lhs, wCol), dyCol: cast(transpose(dy), recipe.wgrad.lhs, xCol) };
  }
  // y, dx and dw of a layer with all its operands.
  function linear(x, w, dy, recipe, draw, scales) {
    const forward = castForward(x, w, recipe, draw, scales), backward = castBackward(dy, forward, recipe, draw, scales);
    const { xRow, xCol, wRow, wCol } = forward, { dyRow, dyCol } = backward;
    return { ...forward, ...backward, y: gemm(xRow, wRow), dx: gemm(dyRow, wCol), dw: gemm(dyCol, xCol) };
  }

  // --- a training: three layers with ReLU learn what a teacher of two does ----------------------------------------------------------

  // Seeds: 1 for data and for the teacher, 2 for the weights, 3 for what recipes draw. The outlier: one channel of each
  // layer's input times 2**octaves, and its weights divided by that. In BF16 this changes no bit.
  const WIDTH = 64, BATCH = 32, LAYERS = 3, MOMENTUM = fp32(0.9);
  class Training {  // recipe: a name, or its cells
    constructor({ recipe, lr, octaves = 0, seed = 0, draw = null }) {
      Object.assign(this, { recipe: recipes[recipe] ?? recipe, octaves, lr: fp32(lr), seed, steps: 0 });
      let drawn = 0;
      this.draw = draw ?? (() => [drawn++, 3]);
      const weights = (word, at, layers) => Array.from({ length: layers }, (_, i) => matrix(WIDTH, WIDTH,
        normals([seed, word], WIDTH * WIDTH, at + i * WIDTH * WIDTH).map((v) => fp32(v * fp32(Math.sqrt(2 / WIDTH))))));
      this.teacher = weights(1, 0, 2).map((w) => toBF16(w));
      this.masters = weights(2, 0, LAYERS);
      this.momenta = this.masters.map((w) => matrix(w.rows, w.cols));
      this.histories = this.masters.map(() => ({ input: [], weight: [], grad_output: [] }));
    }
    // The column of the outlier times 2**octaves or its inverse, exactly.
    stretched(x, sign) {
      const factor = powerOfTwo(sign * this.octaves);
      return mapped(x, (v, i) => i % x.cols === 0 ? v * factor : v);
    }
    // Histories of the layer's tensors take their amaxes, if the recipe predicts scales.
    remember(layer, operands) {
      for (const [tensor, { spec, amax }] of Object.entries(operands)) {
        if (!spec || spec.scaling === "current" || !usable(amax[0])) continue;
        this.histories[layer][tensor] = [amax[0], ...this.histories[layer][tensor]].slice(0, spec.amax_history_len);
      }
    }
    scales(layer) {
      const cells = { input: this.recipe.fprop.lhs, weight: this.recipe.fprop.rhs, grad_output: this.recipe.dgrad.lhs };
      return Object.fromEntries(Object.entries(cells).map(([tensor, spec]) =>
        [tensor, spec && spec.scaling !== "current" ? fromWindow(this.histories[layer][tensor], spec) : null]));
    }
    // One step. Returns its loss and, of each layer, the operands.
    step() {
      const first = 2 * WIDTH * WIDTH + this.steps++ * BATCH * WIDTH, layers = [];
      const x = toBF16(matrix(BATCH, WIDTH, normals([this.seed, 1], BATCH * WIDTH, first)));
      const relu = (y) => mapped(y, (v) => v > 0 ? v : v !== v ? v : 0);
      const target = gemm(relu(gemm(x, this.teacher[0])), this.teacher[1]);
      let h = x;
      this.masters.forEach((master, i) => {
        const scales = this.scales(i), w = this.stretched(toBF16(master), -1);
        const casts = castForward(this.stretched(h, 1), w, this.recipe, this.draw, scales), y = gemm(casts.xRow, casts.wRow);
        layers.push({ casts, scales, y });
        h = i < LAYERS - 1 ? relu(y) : y;
      });
      const rest = mapped(h, (v, i) => fp32(v - target.data[i])), count = rest.data.length;
      const loss = fp32(folded(rest.data.map((v) => fp32(v * v)), fp32) / count);
      let dy = toBF16(mapped(rest, (v) => fp32(v * fp32(2 / count))));
      for (let i = LAYERS - 1; i >= 0; i--) {
        const { casts, scales } = layers[i];
        Object.assign(casts, castBackward(dy, casts, this.recipe, this.draw, scales));
        const dw = this.stretched(gemm(casts.dyCol, casts.xCol), -1);
        this.remember(i, { input: casts.xRow, weight: casts.wRow, grad_output: casts.dyRow });
        if (i > 0) {
          const dx = this.stretched(gemm(casts.dyRow, casts.wCol), 1);
          dy = mapped(dx, (v, at) => layers[i - 1].y.data[at] > 0 ? v : 0);
        }
        this.update(i, dw);
      }
      return { loss, layers: layers.map(({ casts }) => casts) };
    }
    update(layer, dw) {
      const [w, v] = [this.masters[layer].data, this.momenta[layer].data];
      dw.data.forEach((g, i) => {
        v[i] = fp32(fp32(MOMENTUM * v[i]) + g);
        w[i] = fp32(w[i] - fp32(this.lr * v[i]));
      });
    }
  }

  return { formats, recipes, round, encode, decode, randomBits, normals, matrix, mapped, toBF16, transpose, gridOf, computeScale,
    quantize, dequantize, recovered, gemm, linear, fromWindow, floorLog2, Training };
};
if (typeof module !== "undefined") module.exports = { makeEngine };
