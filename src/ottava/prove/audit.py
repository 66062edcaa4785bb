"""Recomputes a few random elements of the GEMMs of a running training on the host, and compares.

    bits     under a known accumulator each element has one right value: a differing bit is a wrong kernel, a wrong
             accumulation mode or a failing card
    bound    where the order or the width of the sums is not known, an element must lie as near to the exact one as any
             such sum can; the report counts these apart, because a small error passes

An audit takes random rows of both operands to the host, 8 and 8, and recomputes their 64 elements by the plain torch of
`kernels.accumulate`, which shares no code with the C++ kernel. It changes no bit of the training, and draws from a
generator of its own. Where single elements are wrong with rate p, n GEMMs are clean with probability (1 - p)**(64 n).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ottava.experiments.snapshot import calls_on
from ottava.kernels import accumulate
from ottava.kernels.reference import block_columns, scale_of_block
from ottava.numerics.accumulator import ACCUMULATORS, Accumulator, get_accumulator
from ottava.numerics.rounding import decode, floor_log2, power_of_two
from ottava.numerics.scaling import Granularity
from ottava.numerics.tensor import Operand, QuantizedTensor, refuse_instruction
from ottava.ops.gemm import GemmPlan, tap
from ottava.prove.judge import decoded

_FP32 = 2.0**-24  # the unit of rounding
_WEAKEST = "ada"  # of all known tensor cores: the shortest groups, and no more bits than any other


@dataclass(frozen=True)
class Finding:
    """A GEMM of which an audited element is wrong."""

    step: int
    """Optimizer step in which it ran, from 1."""
    layer: str
    """Full name; "" if the layer is not known."""
    gemm: str
    """fprop, dgrad, wgrad, or gemm for a call outside of layers."""
    kernel: str
    """Its name in receipts."""
    shape: str
    """M x N x K."""
    judged: str
    """"bits under hopper", or "bound of FP32 sums"."""
    wrong: int
    """Elements that are wrong, of those that were looked at."""
    elements: int
    """Elements that were looked at."""
    row: int
    """Of the first wrong one."""
    column: int
    """Of the first wrong one."""
    got: float
    """Its value."""
    expected: float
    """The right one, or for a bound the exact one."""
    bound: float
    """The largest permitted distance; 0 for bits."""
    guess: str
    """What the bits say: "one bit differs: 22", "the bits of ada"; "" if nothing."""

    def __str__(self) -> str:
        place = " ".join(filter(None, (self.layer, self.gemm)))
        limit, guess = f" +- {self.bound:.3g}" if self.bound else "", f"; {self.guess}" if self.guess else ""
        return (
            f"step {self.step}, {place} ({self.shape}, {self.kernel}): {self.wrong} of {self.elements} elements wrong; "
            f"[{self.row}, {self.column}] is {self.got!r}, needs {self.expected!r}{limit} ({self.judged}){guess}"
        )


class Audit:
    """A spot audit of every quantized GEMM of this process; use it as a context.

    Args:
        model: names the layers in findings; None: findings have shapes only.
        every: optimizer steps from one audited step to the next; the first step is audited.
        elements: of each GEMM; they are those of about as many random rows as columns.
        accumulator: the profile that the device claims for its own sums, an `Accumulator` or its name; None: unknown.
            GEMMs that emulate a named profile are judged by that one.
        event: called with (step, "audit", **facts) for each finding, such as `Watch.writer.event`.
        seed: of the choice of elements.
    Raises:
        ValueError: every or elements is less than 1, an unknown accumulator, or another audit is running.
    Edge cases: GEMMs in high precision, with parts set aside (`mean`), or on codes decoded to BF16 are not judged;
        `skipped` counts them with the reason. On a GPU each audited GEMM waits for the device.

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "tensorwise/hopper")
        >>> with Audit(model) as audit:
        ...     model(torch.randn(32, 64, dtype=torch.bfloat16)).sum().backward()
        >>> audit.gemms, audit.elements_seen, audit.findings
        (2, 128, [])
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        every: int = 1,
        elements: int = 64,
        accumulator: Accumulator | str | None = None,
        event: Callable[..., None] | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (("every", every), ("elements", elements)):
            if value < 1:
                raise ValueError(f"audit: {name} is {value}; needs 1 or more")
        self.every, self.elements, self.event = every, elements, event
        self.claimed = None if accumulator is None else get_accumulator(accumulator)
        self.findings: list[Finding] = []
        self.judged: Counter[str] = Counter()
        """GEMMs by the way in which they were judged."""
        self.skipped: Counter[str] = Counter()
        """GEMMs that were not, by reason."""
        self.steps = self.elements_seen = 0
        self.seconds = 0.0
        """Of the host, in audited GEMMs."""
        self._model, self._draw = model, torch.Generator().manual_seed(seed)
        self._names: dict[int, str] = {}
        self._hook: Any = None

    @property
    def gemms(self) -> int:
        """GEMMs that were judged."""
        return sum(self.judged.values())

    def __enter__(self) -> Self:
        if tap().see is not None:
            raise ValueError("audit: another audit is running in this process; end it first")
        named = () if self._model is None else self._model.named_modules()
        self._names = {id(module.plans): name for name, module in named if hasattr(module, "plans")}
        self._hook = register_optimizer_step_post_hook(self._stepped)
        tap().see = self._see
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tap().see = None
        self._hook.remove()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if not calls_on(optimizer):
            self.step()

    def step(self) -> None:
        """Ends a step; a step of a torch optimizer calls it."""
        self.steps += 1
        tap().see = self._see if self.steps % self.every == 0 else None

    def __str__(self) -> str:
        judged = "; ".join(f"{count:,} by {way}" for way, count in self.judged.items()) or "none"
        skipped = "".join(f"\nnot judged: {count:,} GEMMs: {why}" for why, count in self.skipped.items())
        seen = max(self.elements_seen, 1)
        clean = f"no element is wrong; at 95 %, fewer than 1 of {seen / 3:,.0f} elements is"
        verdict = "\n".join(map(str, self.findings)) or (clean if self.gemms else "nothing was judged")
        return (
            f"{self.gemms:,} GEMMs of {self.steps:,} steps, {self.elements_seen:,} elements, {self.seconds:.2f} s; "
            f"GEMMs judged: {judged}{skipped}\n{verdict}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        kept = {name: getattr(self, name) for name in ("steps", "gemms", "elements_seen", "seconds")}
        counts = {"judged": dict(self.judged), "skipped": dict(self.skipped)}
        return {**kept, **counts, "findings": [asdict(finding) for finding in self.findings]}

    @torch.no_grad()
    def _see(
        self,
        plan: GemmPlan,
        a: Operand,
        b: Operand,
        bias: Tensor | None,
        c: Tensor | None,
        y: Tensor,
        plans: Mapping[Any, Any] | None,
        name: str,
    ) -> None:
        began = time.perf_counter()
        if reason := _refusal(plan, a, b, y):
            self.skipped[reason] += 1
            return
        assert isinstance(a, QuantizedTensor)
        assert isinstance(b, QuantizedTensor)
        m, n = y.shape
        high = min(m, max(1, 2 ** round(math.log2(self.elements) / 2)))
        rows, columns = self._some(m, high), self._some(n, min(n, max(1, self.elements // high)))
        added = None if bias is None else bias.detach()[columns.to(bias.device)].cpu()
        start = None if c is None else _block(c, rows, columns)
        call = _Call(taken(a, rows), taken(b, columns), added, start, _block(y, rows, columns))
        judged, right, bound = self._judge(plan, call, y.device)
        self.judged[judged] += 1
        self.elements_seen += call.y.numel()
        wrong = ~_same(call.y, right) if bound is None else ~_within(call.y, right, bound)
        if wrong.any():
            at, record = tuple(wrong.nonzero()[0].tolist()), plan.record
            place = self.steps + 1, self._names.get(id(plans), ""), name, record.kernel, f"{m} x {n} x {record.k}"
            count = int(wrong.sum()), wrong.numel(), int(rows[at[0]]), int(columns[at[1]])
            far = (0.0, _guess(call, right, wrong, judged)) if bound is None else (float(bound[at]), "")
            finding = Finding(*place, judged, *count, float(call.y[at]), float(right[at]), *far)
            self.findings.append(finding)
            if self.event is not None:
                self.event(finding.step, "audit", **{k: v for k, v in asdict(finding).items() if k != "step"})
        self.seconds += time.perf_counter() - began

    def _some(self, length: int, count: int) -> Tensor:
        return torch.randperm(length, generator=self._draw)[:count]

    def _judge(self, plan: GemmPlan, call: _Call, device: torch.device) -> tuple[str, Tensor, Tensor | None]:
        """How a GEMM is judged, what its elements should be, and how far they may be from that; None: not at all."""
        named = plan.kept[2] if len(plan.kept) > 2 else None
        rule = named if named is not None and named.emulated else None
        on_chip = device.type != "cpu" and plan.record.kernel in ("scaled_mm", "triton_gemm")
        if rule is None and self.claimed is not None and self.claimed.emulated and (on_chip or device.type == "cpu"):
            rule = self.claimed
        if rule is not None and refuse_instruction(call.a.spec, call.b.spec, rule) is None:
            return f"bits under {rule.name}", call.under(rule), None
        exact, terms, steps = call.exact()
        bound = (steps + 8) * _FP32 * terms * 1.01
        if on_chip:
            bound = bound + call.shortened(get_accumulator(_WEAKEST))
        info = torch.finfo(call.y.dtype)
        bound = bound + info.eps / 2 * (exact.abs() + bound) + info.tiny * info.eps
        return f"the bound of {'any tensor core' if on_chip else 'FP32 sums'}", exact, bound


def _refusal(plan: GemmPlan, a: Operand, b: Operand, y: Tensor) -> str:
    """Why a GEMM cannot be judged; "" if it can."""
    if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor):
        return "operands in high precision"
    if plan.record.kernel.endswith((" bfloat16", " float16", " float32")):
        return "codes were decoded before the GEMM"
    if a.aside is not None or b.aside is not None:
        return "parts of the operands were set aside"
    if y.device.type == "cpu" and plan.record.kernel == "scaled_mm":
        return "torch's scaled GEMM on a CPU rounds more often than is written down"
    if y.is_cuda and torch.cuda.is_current_stream_capturing():
        return "captured in a CUDA graph"
    return "an empty result" if 0 in y.shape else ""


def taken(x: QuantizedTensor, rows: Tensor) -> QuantizedTensor:
    """Some rows of an operand, on the host, with the scales that they have.

    Example:
        >>> import ottava
        >>> spec = ottava.QuantizationSpec(ottava.E4M3, ottava.Granularity(128, 128))
        >>> x = ottava.quantize(torch.randn(300, 256), spec)
        >>> some = taken(x, torch.tensor([299, 7]))
        >>> torch.equal(some.dequantize(torch.float32), x.dequantize(torch.float32)[[299, 7]])
        True
    """
    if x.spec.scale_format == "e4m3":
        # the scale of the tensor is found from the largest scale, so a row that has it comes, too
        height = x.spec.granularity.rows or x.shape[0]
        top = int(x.scale_inv.nan_to_num(0.0).amax(1).argmax()) * height
        rows = torch.cat([rows, torch.tensor([top])])
    at = rows.to(x.data.device)
    codes = x.data.view(torch.uint8)[at].cpu().view(x.data.dtype)
    grid, spec, scale = x.spec.granularity, x.spec, x.scale_inv
    if grid.rows is not None:
        scale, spec = scale[at // grid.rows], replace(spec, granularity=Granularity(1, grid.cols))
    return QuantizedTensor(codes, scale.cpu(), spec, x.dtype)


@dataclass(frozen=True)
class _Call:
    """The audited part of a GEMM, on the host; operands may have a row more than the result."""

    a: QuantizedTensor
    b: QuantizedTensor
    bias: Tensor | None
    c: Tensor | None
    y: Tensor

    def under(self, rule: Accumulator) -> Tensor:
        """The bits under an accumulator."""
        m, n = self.y.shape
        more = self.a.shape[0] - m, self.b.shape[0] - n
        bias = None if self.bias is None else torch.nn.functional.pad(self.bias, (0, more[1]))
        c = None if self.c is None else torch.nn.functional.pad(self.c, (0, more[1], 0, more[0]))
        return accumulate.gemm(self.a, self.b, self.y.dtype, bias, rule, c)[:m, :n]

    def exact(self) -> tuple[Tensor, Tensor, int]:
        """(the elements, the sum of the magnitudes of their terms, the length of the sum), in float64."""
        m, n = self.y.shape
        a, b = (decoded(x.data, x.scale_inv, x.spec) for x in (self.a, self.b))
        y, terms = (a @ b.t())[:m, :n], (a.abs() @ b.abs().t())[:m, :n]
        for added in (self.bias, self.c):
            if added is not None:
                y, terms = y + added.double(), terms + added.double().abs()
        return y, terms, self.a.shape[1] + 3 * len(self.blocks())

    def blocks(self) -> range:
        """Where sums begin along K: each has scales of its own."""
        k = self.a.shape[1]
        return range(0, k, max(block_columns(self.a.spec.granularity, self.b.spec.granularity, k), 1))

    def shortened(self, rule: Accumulator) -> Tensor:
        """The most that an accumulator can cut off, in any contiguous chains of groups.

        A group cuts each of its terms and the accumulator below 2**(E - fraction_bits), and its sum after kept_bits. E
        is at most the exponent of the largest product, or of the accumulator, which is never more than the sum of the
        magnitudes, because cutting shortens.
        """
        assert rule.group is not None
        (m, n), blocks = self.y.shape, self.blocks()
        lhs, rhs = (decode(x.data, x.spec.format).double() for x in (self.a, self.b))
        lowest = [x.spec.format.emin for x in (self.a, self.b)]
        total = torch.zeros(m, n, dtype=torch.float64)
        for at in blocks:
            p, q = lhs[:m, at : at + blocks.step], rhs[:n, at : at + blocks.step]
            sums = p.abs() @ q.abs().t()
            tops = [floor_log2(x.abs().amax(1)).clamp(min=low) for x, low in zip((p, q), lowest, strict=True)]
            exponent = torch.maximum(tops[0][:, None] + tops[1], floor_log2(sums).clamp(min=-126))
            groups = -(-p.shape[1] // rule.group)
            cut = (rule.group + 1) * power_of_two(exponent - rule.fraction_bits) + 2.0**-rule.kept_bits * sums
            of_a, of_b = (scale_of_block(x, at).double().expand(x.shape[0], 1) for x in (self.a, self.b))
            total += groups * cut * (of_a[:m] * of_b[:n].t()).abs()
        return total


def _block(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return x.detach()[rows.to(x.device)][:, columns.to(x.device)].cpu()


def _same(x: Tensor, y: Tensor) -> Tensor:
    kind = torch.int32 if x.element_size() == 4 else torch.int16
    return (x.view(kind) == y.view(kind)) | (x.isnan() & y.isnan())


def _within(y: Tensor, exact: Tensor, bound: Tensor) -> Tensor:
    wide = y.double()
    beyond = wide.isinf() & (exact.abs() + bound >= torch.finfo(y.dtype).max) & (exact.sign() == wide.sign())
    return ((wide - exact).abs() <= bound) | beyond | (~exact.isfinite() & ~wide.isfinite())


def _guess(call: _Call, right: Tensor, wrong: Tensor, judged: str) -> str:
    """What would explain wrong bits: another accumulator, or single bits that flipped."""
    # one wrong element may have the bits of another profile by chance
    for name, profile in ACCUMULATORS.items() if wrong.sum() > 1 else ():
        runs = profile.emulated and refuse_instruction(call.a.spec, call.b.spec, profile) is None
        if runs and judged != f"bits under {name}" and bool(_same(call.y, call.under(profile)).all()):
            return f"these are the bits of {name}"
    kind, mask = (torch.int32, 0xFFFFFFFF) if right.element_size() == 4 else (torch.int16, 0xFFFF)
    places = {flip & mask for flip in (call.y.view(kind) ^ right.view(kind))[wrong].tolist()}
    if all(place.bit_count() == 1 for place in places):
        return "one bit differs: " + ", ".join(str(place.bit_length() - 1) for place in sorted(places))
    return ""
