"""Trees that probes find, against trees built here another way: planted at random, of accumulators, of instructions."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ottava
from ottava.kernels import accumulate as in_torch
from ottava.kernels.native import accumulate as native
from ottava.kernels.native import build as native_build
from ottava.kernels.native import gemm as native_gemm
from ottava.numerics.accumulator import ACCUMULATORS, Accumulator
from ottava.numerics.formats import E4M3, E5M2, Format
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.prove.order import Addition, Order, OrderError, confirm, of_gemm, of_sum, reveal

Tree = Any
"""A term, or a tuple of trees: written independently of `Order`."""
FP32 = Addition(23, None, "to nearest")


def clusters(tree: Tree) -> tuple[frozenset[int], set[frozenset[int]]]:
    """(terms of a tree, the terms of each addition in it)."""
    if isinstance(tree, int):
        return frozenset({tree}), set()
    found = [clusters(part) for part in tree]
    every = frozenset().union(*(terms for terms, _ in found))
    return every, {every}.union(*(inner for _, inner in found))


def cut(x: Fraction, unit: Fraction) -> Fraction:
    """Toward zero."""
    return math.trunc(x / unit) * unit


def octave(x: Fraction) -> Fraction:
    """The power of two at or below |x|."""
    power = Fraction(2) ** (abs(x).numerator.bit_length() - x.denominator.bit_length())
    return power if power <= abs(x) else power / 2


def added(tree: Tree, terms: list[float], bits: int = 13) -> Fraction:
    """Exact arithmetic: two terms in fp32, to nearest; more as a tensor core adds them, cut to `bits`."""
    if isinstance(tree, int):
        return Fraction(terms[tree])
    parts = [added(part, terms, bits) for part in tree]
    if len(parts) == 2:
        return Fraction(float(np.float32(float(sum(parts)))))
    largest = max((octave(part) for part in parts if part), default=Fraction(1))
    total = sum((cut(part, largest / 2**bits) for part in parts), Fraction(0))
    return cut(total, octave(total) / 2**bits) if total else total


def planted(tree: Tree) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.tensor(float(added(tree, x.tolist())))


def random_tree(draw: random.Random, terms: list[int], widest: int) -> Tree:
    while len(terms) > 1:
        draw.shuffle(terms)
        taken = [terms.pop() for _ in range(min(len(terms), draw.randint(2, widest)))]
        terms.append(tuple(taken))  # type: ignore[arg-type]
    return terms[0]


def test_planted_trees_are_found() -> None:
    """Random trees of pairs, and of up to six at once; and random sums along the tree that was found."""
    draw, confirmed = random.Random(1), 0
    for case in range(24):
        n, widest = draw.randint(2, 40), (2, 6)[case % 2]
        tree = random_tree(draw, list(range(n)), widest)
        probed = of_sum(planted(tree), n)
        order = reveal(probed, seed=case)
        assert order.clusters == clusters(tree)[1], tree
        assert order.pair in (None, FP32, Addition(None))
        assert order.fused is None or (order.fused.aligned, order.fused.kept or 13) == (13, 13)
        if all(how is None or how.mode for how in (order.pair, order.fused)):
            confirmed += 1
            assert confirm(probed, order, trials=8) == 1.0
    assert confirmed > 10


def coded(codes: Tensor, fmt: Format = E4M3) -> QuantizedTensor:
    return QuantizedTensor(codes.to(fmt.storage_dtype), torch.ones(1, 1), QuantizationSpec(fmt), torch.float32)


def chained(k: int, rule: Accumulator) -> Tree:
    """As docs/accumulation.md tells it: groups along K, each with the sum so far; promotions add chains in fp32."""
    assert rule.group is not None
    length, total = rule.promotion or k, None
    for begin in range(0, k, length):
        chain: tuple[Tree, ...] = ()
        for at in range(begin, min(begin + length, k), rule.group):
            group = tuple(range(at, min(at + rule.group, k)))
            chain = (chain, *group) if chain else group
        total = chain if total is None else (total, chain)
    return total


@pytest.mark.parametrize("module", [in_torch, native], ids=lambda module: module.NAME)
def test_accumulators_add_as_they_claim(module: Any) -> None:
    """Tree, width and rounding of every profile of scales outside, in both kernels, for whole and ragged K."""
    if module is native and native_build.load("accumulate").library is None:
        pytest.skip("no C++ compiler")
    for rule in ACCUMULATORS.values():
        if not rule.emulated or rule.dot > 1:
            continue
        for k in (100, 300) if module is native else (40,):
            run = module.plan_accumulate(coded(torch.ones(1, k)), coded(torch.ones(1, k)), torch.float32, None, rule)
            probed = of_gemm(lambda a, b, run=run: run(coded(a), coded(b), None), k, torch.float8_e4m3fn)
            order = reveal(probed)
            assert order.clusters == clusters(chained(k, rule))[1], (rule.name, k)
            assert order.fused == Addition(rule.kept_bits, rule.fraction_bits, "toward zero"), rule.name
            chains = -(-k // (rule.promotion or k))
            assert order.pair == (None, Addition(None), FP32)[min(chains, 3) - 1], (rule.name, k)
            assert chains == 2 or confirm(probed, order, trials=16) == 1.0
            assert f"terms cut to {rule.fraction_bits} bits" in order.name


def test_formats_of_operands() -> None:
    """E5M2 against E4M3, FP16, BF16 and FP32: the same tree."""
    hopper = ACCUMULATORS["hopper"]

    def mixed(a: Tensor, b: Tensor) -> Tensor:
        return ottava.gemm(coded(a, E5M2), coded(b), out_dtype=torch.float32, accumulator=hopper)

    assert reveal(of_gemm(mixed, 96, torch.float8_e4m3fn)).clusters == clusters(chained(96, hopper))[1]
    tree = ((((0, 1), 2), 3), (4, (5, 6)))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2):
        probed = of_gemm(lambda a, b: planted(tree)((a.double() * b.double())[0]).reshape(1, 1), 7, dtype)
        assert reveal(probed).clusters == clusters(tree)[1], dtype


def test_the_native_kernel_sums_from_first_k_to_last() -> None:
    """src/gemm.cpp says so, of any tile. VDPBF16PS adds the odd product of a pair first (Intel), others go in order."""
    level = native_gemm.fastest()
    if level.built.library is None:
        pytest.skip("no C++ compiler")
    if "NEON-BF16" in level.name:
        pytest.skip("BFMMLA has another order")
    k = 130
    terms = [i ^ 1 for i in range(k)] if level.name == "AVX512-BF16" else list(range(k))
    tree: Tree = terms[0]
    for term in terms[1:]:
        tree = (tree, term)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return native_gemm.run(coded(a), coded(b), torch.float32, None)[0]

    for shape, at in (((1, 1), (0, 0)), ((33, 17), (32, 16)), ((3, 70), (1, 69))):
        order = reveal(of_gemm(run, k, torch.float8_e4m3fn, shape=shape, at=at))
        assert order.clusters == clusters(tree)[1]
        assert order.pair == FP32
        assert order.name.startswith("sequential")


def test_triton_promotes_where_it_says() -> None:
    """In the interpreter: every block of K is a sum of its own, and promotions add chains of blocks."""
    pytest.importorskip("triton", reason="Triton has no build for this machine")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    from kernels.triton import interpreter

    interpreter.install()
    from ottava.kernels.triton.gemm import CONFIGS, run

    k, config = 384, next(config for config in CONFIGS if config.promote == 128)

    def two_of_each_block(terms: Tensor) -> Tensor:
        a = torch.zeros(1, k)
        a[0, [5, 77, 128, 255, 300, 383]] = terms.float()
        return run(coded(a, E5M2), coded(torch.ones(1, k)), torch.float32, None, config)[0, 0]

    order = reveal(of_sum(two_of_each_block, 6, torch.float8_e5m2))
    assert order.clusters == clusters((((0, 1), (2, 3)), (4, 5)))[1]


def test_sums_of_torch_and_numpy_along_the_tree_that_was_found() -> None:
    """Nobody documents these orders; random sums along the tree have the bits of the library."""
    one = torch.ones(())
    mm, linear = (lambda a, b: a @ b.T), torch.nn.functional.linear
    cases: list[tuple[Any, torch.dtype]] = [
        (of_sum(torch.sum, 300), torch.float32),
        (of_sum(lambda x: torch.tensor(np.sum(x.numpy())), 200), torch.float32),
        (of_gemm(mm, 200, shape=(4, 4)), torch.float32),
        (of_gemm(mm, 200, torch.bfloat16, shape=(4, 4)), torch.bfloat16),
        (of_gemm(linear, 200, torch.bfloat16, shape=(16, 16)), torch.bfloat16),
    ]
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"):

        def scaled(a: Tensor, b: Tensor) -> Tensor:
            return torch._scaled_mm(a, b.T, one, one, out_dtype=torch.float32)

        cases.append((of_gemm(scaled, 256, torch.float8_e4m3fn, shape=(16, 16)), torch.float32))
    for probed, out_dtype in cases:
        order = reveal(probed)
        assert order.pair == FP32
        assert order.fused is None
        assert confirm(probed, order, trials=16, out_dtype=out_dtype) == 1.0, order.name
        # the other one of the two plainest trees has other bits, so that equal ones say something
        n = order.n
        chain = ((0, 1), *((i, n + i - 2) for i in range(2, n)))
        if (wrong := Order(n, chain, FP32)).clusters != order.clusters and out_dtype == torch.float32:
            assert confirm(probed, wrong, trials=16) < 1.0


def _pairwise(terms: list[int]) -> Tree:
    half = (len(terms) + 1) // 2
    return terms[0] if len(terms) == 1 else (_pairwise(terms[:half]), _pairwise(terms[half:]))


def _lanes(n: int, lanes: int) -> Tree:
    return tuple(_chain(list(range(lane, n, lanes))) for lane in range(lanes))


def _chain(terms: list[Any]) -> Tree:
    tree = terms[0]
    for term in terms[1:]:
        tree = (tree, term)
    return tree


def test_names_and_text() -> None:
    """What a reader sees, for the trees that libraries have."""
    names = {
        "sequential": _chain(list(range(20))),
        "sequential from the last": _chain(list(range(19, -1, -1))),
        "sequential, each 2 from the last": _chain([i ^ 1 for i in range(20)]),
        "pairwise": _pairwise(list(range(16))),
        "4 lanes of 5 (sequential), pairwise": _pairwise(list(_lanes(20, 4))),
        "8 lanes of 4 (sequential), one after another": _chain(list(_lanes(32, 8))),
        "4 blocks of 5 (sequential), one after another": _chain(
            [_chain(list(range(5 * i, 5 * i + 5))) for i in range(4)]
        ),
        "groups of 5 fused, one after another": chained(20, Accumulator(name="five", group=5)),
        "4 fused": (0, 1, 2, 3),
        "a chain, not in order": _chain([3, 0, 4, 1, 2, 5]),
    }
    for name, tree in names.items():
        order = reveal(of_sum(planted(tree), len(clusters(tree)[0])))
        assert order.name.partition(";")[0] == name, (order.name, tree)
        kept = json.loads(order.to_json())
        assert (kept["name"], len(kept["additions"])) == (order.name, len(clusters(tree)[1]))
    assert str(reveal(of_sum(planted((0, (1, 2), (3, 4, 5))), 6))) == "(0 (1 2) (3 4 5))"


def test_what_rounding_is_found() -> None:
    """Chains whose sums are cut toward zero, or kept in BF16, FP16 or FP64; a tree that is cut is refused."""

    def cut_to(x: Fraction) -> Fraction:
        return cut(x, octave(x) / 2**23) if x else x

    def chain(rounded: Callable[[Fraction], Any]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            total = Fraction(0)
            for term in x.tolist():
                total = Fraction(rounded(total + Fraction(term)))
            return torch.tensor(float(total), dtype=torch.float64)

        return run

    def halves(x: Tensor) -> Tensor:
        terms = [Fraction(term) for term in x.tolist()]
        while len(terms) > 1:
            terms = [cut_to(one + other) for one, other in zip(terms[::2], terms[1::2], strict=True)]
        return torch.tensor(float(terms[0]), dtype=torch.float64)

    cases: tuple[tuple[Callable[[Fraction], Any], Addition], ...] = (
        (cut_to, Addition(23, None, "toward zero")),
        (lambda x: float(torch.tensor(float(x)).bfloat16()), Addition(7, None, "to nearest")),
        (
            lambda x: float(np.float16(float(x) / 2**86)) * 2**86 if abs(x) > 2**50 else float(x),
            Addition(10, None, "to nearest"),
        ),
        (float, Addition(52, None, "to nearest")),
    )
    for rounded, expected in cases:
        order = reveal(of_sum(chain(rounded), 20))
        assert (order.pair, order.name.partition(";")[0]) == (expected, "sequential")
    with pytest.raises(OrderError, match="does not round to nearest"):
        reveal(of_sum(halves, 16))


def test_refusals_say_why() -> None:
    """No order, no counts, an order that depends on the numbers; sizes and dtypes that cannot be probed."""

    for function, n, dtype, words in (
        (lambda x: torch.tensor(math.fsum(x.tolist())), 16, torch.float32, "no term is ever lost"),
        (lambda x: x.sort().values.sum() * 1.5, 16, torch.float32, "needs exact counts"),
        (torch.sum, 300, torch.bfloat16, "needs exact counts"),
        (torch.sum, 1, torch.float32, "needs 2 to 4096"),
        (torch.sum, 8, torch.int32, "floating-point"),
    ):
        with pytest.raises(ValueError, match=words):
            reveal(of_sum(function, n, dtype))
    with pytest.raises(ValueError, match="inside"):
        of_gemm(torch.mm, 8, shape=(2, 2), at=(2, 0))
    with pytest.raises(OrderError, match="rounds"):
        Order(4, ((0, 1), (2, 3), (4, 5))).sum(torch.ones(1, 4))


def test_compensation_shows_in_the_bits() -> None:
    """Kahan's sum has the tree of a plain one, and other sums."""

    def kahan(x: Tensor) -> Tensor:
        total, lost = torch.zeros(()), torch.zeros(())
        for term in x:
            y = term - lost
            after = total + y
            lost, total = (after - total) - y, after
        return total

    probed = of_sum(kahan, 32)
    order = reveal(probed)
    assert order.name.startswith("sequential;")
    assert confirm(probed, order) < 0.9


def test_cost() -> None:
    """About 2 n probes for a chain from either end (the first term as pivot: n * n / 2), n log2 n for halves."""
    n = 256
    for tree, most in ((list(range(n)), 4 * n), (list(range(n - 1, -1, -1)), 4 * n)):
        order = np.array(tree)
        probed = of_sum(lambda x, order=order: torch.tensor(np.cumsum(x.numpy()[order], dtype=np.float32)[-1]), n)
        assert reveal(probed).probes < most
    halves = of_sum(folded, n)
    assert reveal(halves).probes < 1.5 * n * math.log2(n)


def folded(x: Tensor) -> Tensor:
    """Pairwise: neighbours first."""
    while len(x) > 1:
        x = x[::2] + x[1::2]
    return x[0]
