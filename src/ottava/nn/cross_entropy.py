"""Cross-entropy fused with the linear in front of it, in chunks of tokens: the logits of all tokens never exist.

    z (m, V) = x (m, K) @ w (V, K).T + b          of one chunk; capped: z' = c tanh(z / c)
    lse      = log sum exp z'
    loss     = (1 - s) (lse - z'[target]) + s (lse - mean z') + r lse^2        s: label smoothing, r: z-loss
    dz       = softmax(z') (1 + 2 r lse) - (1 - s) onehot(target) - s / V      times 1 - (z' / c)^2 where capped

The forward computes the gradients of a chunk while its logits exist: dx, dw and db for the sum of the losses. The
backward multiplies them with the incoming gradient, one number. Three GEMMs in all, as without fusion, each under the
recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ottava.engine.autocast import Ambient
from ottava.engine.functional import Call, refuse_second_derivative
from ottava.engine.quantizer import LinearQuantizers, Notes, Record
from ottava.kernels.gate import applied, no_autocast
from ottava.nn.layer import Layer, autocast_input
from ottava.numerics.tensor import Operand
from ottava.ops.gemm import multiply
from ottava.recipe import Recipe, get_recipe

Reduction = Literal["mean", "sum", "none"]
_BLOCK = 128
"""Chunks hold whole blocks of every granularity, so that casts give the same bits as without chunks."""


class Vocabulary:
    """The classes and tokens that this process has: all of them. Ranks split them by `sharding.SharedVocabulary`."""

    def gather(self, tensor: str, operand: Operand, dim: int) -> Operand:
        """Of all tokens that are computed together."""
        return operand

    def sum(self, tensor: str, partial: Tensor) -> Tensor:
        """Of dx over all classes, for the tokens of this process."""
        return partial

    def everybody(self, of_tokens: Tensor) -> Tensor:
        """(m,) of this process -> of all tokens that are computed together."""
        return of_tokens

    def own(self, of_tokens: Tensor) -> Tensor:
        """The inverse of `everybody`."""
        return of_tokens

    def total(self, count: Tensor) -> Tensor:
        """Of the tokens of all ranks."""
        return count

    def classes(self, here: int) -> int:
        """Of all ranks."""
        return here

    def at_once(self, tokens: int) -> int:
        """Those of this process among so many that are computed together."""
        return tokens

    def places(self, target: Tensor, counts: Tensor, here: int) -> tuple[Tensor, Tensor]:
        """(where the targets stand in the logits; which of them stand there)."""
        return torch.where(counts, target, 0), counts

    def reduced(self, logits: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(lse, the target's logit, the mean logit), each (m,), over all classes."""
        return logits.logsumexp(-1), own, logits.mean(-1)


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The settings of the loss."""

    ignore_index: int = -100
    """Target of tokens that do not count."""
    label_smoothing: float = 0.0
    """Share of a target that all classes divide, 0 to 1."""
    z_loss: float = 0.0
    """Factor of lse^2 (PaLM: 1e-4), which keeps logits from drifting."""
    softcap: float | None = None
    """Largest magnitude of a logit (Gemma 2: 30); None: any."""
    reduction: Reduction = "mean"
    """Over the tokens that count: mean, sum; "none" gives a loss a token, 0 where it does not count."""
    chunk: int | None = None
    """Tokens at a time; None: as many as give logits of about the size of the input."""

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"cross-entropy: got reduction={self.reduction!r}; needs 'mean', 'sum' or 'none'")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"cross-entropy: got label_smoothing={self.label_smoothing}; needs 0 to 1")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"cross-entropy: got softcap={self.softcap}; needs a number above 0, or None")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"cross-entropy: got chunk={self.chunk}; needs at least one token")

    def tokens_at_once(self, tokens: int, features: int, classes: int) -> int:
        """Size of a chunk.

        Example:
            >>> CrossEntropy().tokens_at_once(8192, 4096, 131072)
            256
        """
        if self.chunk is not None:
            return self.chunk
        fair = -(-tokens * features // max(classes, 1))
        return max(_BLOCK, -(-fair // _BLOCK) * _BLOCK)

    def of(self, logits: Tensor, target: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        """Logits, fp32 (m, V), target (m,) -> (loss (m,), lse (m,)); caps the logits in place."""
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        counts = target != self.ignore_index
        at, here = vocabulary.places(target, counts, logits.shape[-1])
        own = torch.where(here, logits.gather(-1, at[:, None]).squeeze(-1), 0.0)
        lse, own, mean = vocabulary.reduced(logits, own)
        loss = lse - own
        if self.label_smoothing:
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * (lse - mean)
        if self.z_loss:
            loss = loss + self.z_loss * lse.square()
        return torch.where(counts, loss, 0.0), lse

    def gradient(
        self, logits: Tensor, lse: Tensor, target: Tensor, share: Tensor | None, vocabulary: Vocabulary
    ) -> Tensor:
        """The gradient of the sum of the losses, each times its share; overwrites the capped logits."""
        slope = None if self.softcap is None else 1 - (logits / self.softcap).square_()
        counts = target != self.ignore_index
        d = logits.sub_(lse[:, None]).exp_()
        if self.z_loss:
            d = d.mul_((1 + 2 * self.z_loss * lse)[:, None])
        if self.label_smoothing:
            d = d.sub_(self.label_smoothing / vocabulary.classes(d.shape[-1]))
        at, here = vocabulary.places(target, counts, d.shape[-1])
        hit = torch.where(here, self.label_smoothing - 1, 0.0).to(d.dtype)[:, None]
        d = d.scatter_add_(-1, at[:, None], hit)
        if slope is not None:
            d = d.mul_(slope)
        # masked, not multiplied: a token that does not count may have logits that are not finite
        d = d.masked_fill_(~counts[:, None], 0.0)
        return d if share is None else d.mul_(share[:, None])


class LinearCrossEntropy(Layer, nn.Linear):
    """cross_entropy(linear(x), target), in chunks of tokens: the logits of all tokens never exist.

    Args:
        in_features, num_classes, bias, device, dtype: of the linear, as `torch.nn.Linear`; its weight may be tied.
        recipe: a Recipe or its name; each chunk has its own casts.
        ignore_index, label_smoothing, z_loss, softcap, reduction, chunk: see `CrossEntropy`.
    Shapes: input (..., in_features), target int64 (...) -> fp32 () or, for reduction "none", (...).
    Kept for backward: dx in the input's dtype and dw in the weight's, from the forward (for "none" only the input, and
        the backward computes the logits again). While it runs: the logits of one chunk in fp32, and dw in fp32.
    Raises:
        ValueError: shapes, a target that is no class, settings; as `Linear` else.
        NotImplementedError: a second derivative.
    Edge cases: if no token counts, the mean is nan, as in torch. Calibration computes all logits at once. The layer
        casts the gradient of the summed loss, whatever the reduction, before it knows the incoming gradient.

    Example:
        >>> import ottava
        >>> head = ottava.nn.LinearCrossEntropy(64, 1000, dtype=torch.bfloat16)
        >>> head(torch.zeros(2, 5, 64, dtype=torch.bfloat16), torch.zeros(2, 5, dtype=torch.int64))  # log(1000)
        tensor(6.9078, grad_fn=<_LinearCrossEntropyBackward>)
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        recipe: Recipe | str = "bf16",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        chunk: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, bias, device=device, dtype=dtype)
        self.settings = CrossEntropy(ignore_index, label_smoothing, z_loss, softcap, reduction, chunk)
        self.adopt(get_recipe(recipe), name="")

    def formula(self, input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, target: Tensor) -> Tensor:
        """Under the recipe."""
        return _apply(self.settings, call, input, weight, bias, target)

    def plain(self, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        """In high precision, also in chunks."""
        call = Call(self.quantizers, get_recipe("bf16"))
        return _apply(self.settings, call, autocast_input(input), weight, bias, target)

    def _calibrate(self, input: Tensor, weight: Tensor, bias: Tensor | None, settings: Ambient, *more: Any) -> Tensor:
        """All logits at once, so that the door of their gradient sees it."""
        (target,) = more
        logits = super()._calibrate(input, weight, bias, settings).flatten(0, -2)
        vocabulary = _vocabulary(self)
        _check(input, weight, target, self.settings.ignore_index, vocabulary)
        losses, _ = self.settings.of(logits.float().clone(), vocabulary.everybody(target.flatten()), vocabulary)
        losses = vocabulary.own(losses) if self.settings.reduction == "none" else losses
        return _reduced(losses, target, self.settings, vocabulary)

    def extra_repr(self) -> str:
        """torch's, the settings and the recipe."""
        return f"{nn.Linear.extra_repr(self)}, {self.settings}, recipe={self.recipe.name}"


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | str = "bf16",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> Tensor:
    """As `LinearCrossEntropy`, with the weight of another module.

    Args:
        input: (..., K); weight: (V, K); target: int64 (...); bias: (V,).
        recipe: without predicted scales, because only a layer keeps histories.
    Raises:
        ValueError: a recipe with predicted scales; else as there.

    Example:
        >>> x, w = torch.zeros(3, 8), torch.zeros(100, 8)
        >>> linear_cross_entropy(x, w, torch.tensor([1, 2, 3]))                                          # log(100)
        tensor(4.6052)
    """
    recipe = get_recipe(recipe)
    if recipe.predicted:
        raise ValueError(
            f"linear_cross_entropy: recipe {recipe.name!r} predicts scales, which a layer keeps; use LinearCrossEntropy"
        )
    settings = CrossEntropy(ignore_index, label_smoothing, z_loss, softcap, reduction, chunk)
    return _apply(settings, Call(LinearQuantizers(), recipe), autocast_input(input), weight, bias, target)


def _apply(
    settings: CrossEntropy, call: Call, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
) -> Tensor:
    _check(input, weight, target, settings.ignore_index, _vocabulary(call))
    rows = input.reshape(-1, input.shape[-1])
    losses = applied(_LinearCrossEntropy, settings, call, torch.is_grad_enabled(), rows, weight, bias, target.flatten())
    return losses.view(target.shape) if settings.reduction == "none" else losses  # type: ignore[no-any-return]


def _vocabulary(of: Call | Layer) -> Vocabulary:
    assert of.exchange is None or isinstance(of.exchange, Vocabulary)
    return of.exchange or Vocabulary()


def _check(input: Tensor, weight: Tensor, target: Tensor, ignored: int, vocabulary: Vocabulary) -> None:
    if input.dim() == 0 or input.shape[-1] != weight.shape[1] or target.shape != input.shape[:-1]:
        raise ValueError(
            f"cross-entropy: got input {tuple(input.shape)} and target {tuple(target.shape)}; needs "
            f"(..., {weight.shape[1]}) and one class a token"
        )
    if target.dtype != torch.int64:
        raise ValueError(f"cross-entropy: got a target of {target.dtype}; needs torch.int64, the number of a class")
    if target.is_cpu and target.numel() and not torch.compiler.is_compiling():  # elsewhere the kernel says so, later
        classes = vocabulary.classes(weight.shape[0])
        wrong = target[(target != ignored) & ((target < 0) | (target >= classes))]
        if wrong.numel():
            raise ValueError(
                f"cross-entropy: got class {int(wrong[0])} as a target; needs 0 to {classes - 1}, or "
                f"ignore_index {ignored} for tokens that do not count"
            )


def _reduced(losses: Tensor, target: Tensor, settings: CrossEntropy, vocabulary: Vocabulary) -> Tensor:
    if settings.reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if settings.reduction == "sum" else total / _count(target, settings, vocabulary)


def _count(target: Tensor, settings: CrossEntropy, vocabulary: Vocabulary) -> Tensor:
    return vocabulary.total((target != settings.ignore_index).sum())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: CrossEntropy,
        call: Call,
        grad_enabled: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
    ) -> Tensor:
        needs = [grad_enabled and needed for needed in ctx.needs_input_grad[3:6]]
        ctx.settings, ctx.call, ctx.needs = settings, call, needs
        later = settings.reduction == "none"
        notes: Notes = []
        with no_autocast(x.device):
            operands = x, weight, bias, target
            losses, grads = _in_chunks(settings, call, operands, None, [False] * 3 if later else needs, notes)
        ctx.notes = call.keep(notes, linked=True in needs)
        ctx.later, ctx.count = later, None
        if later:
            ctx.save_for_backward(x, weight, bias, target)
        else:
            if settings.reduction == "mean":
                ctx.count = _count(target, settings, _vocabulary(call))
            ctx.save_for_backward(*grads)
        if not torch.compiler.is_compiling():
            call.saved_bytes = x.nbytes if later else sum(g.nbytes for g in grads if g is not None)
            call.high_precision_bytes = x.nbytes + 4 * x.shape[0] * weight.shape[0] if any(needs) else 0
        return _reduced(losses, target, settings, _vocabulary(call))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative(
                "cross-entropy fused with its linear", "use a Linear and torch's cross_entropy there"
            )
        (d_loss,), call = grad_outputs, ctx.call
        notes: Notes = [*ctx.notes]
        if ctx.later:
            with no_autocast(d_loss.device):
                _, grads = _in_chunks(ctx.settings, call, ctx.saved_tensors, d_loss.float(), ctx.needs, notes)
        else:
            share = d_loss if ctx.count is None else d_loss / ctx.count
            grads = tuple(None if g is None else (g * share).to(g.dtype) for g in ctx.saved_tensors)
        call.take(notes)
        if call.after_backward is not None:
            call.after_backward()
        return None, None, None, *grads, None


def _in_chunks(
    settings: CrossEntropy, call: Call, operands: Any, share: Tensor | None, needs: list[bool], notes: Notes
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """(losses, fp32 (M,); gradients of x, weight and bias, where needed, of the sum of losses times their shares).

    operands: x, weight, bias or None, target.  notes: gets what the casts see.
    """
    x, weight, bias, target = operands
    doors, cells = call.doors, call.recipe
    fprop, dgrad, wgrad = cells.fprop, cells.dgrad, cells.wgrad
    needs_dx, needs_dw, needs_db = needs
    record: Record = notes if any(needs) else False
    vocabulary = _vocabulary(call)
    size = vocabulary.at_once(settings.tokens_at_once(x.shape[0], x.shape[1], weight.shape[0]))
    alone = x.shape[0] <= size
    w_row, w_col = doors.weight(weight, fprop.rhs, dgrad.rhs, columnwise=needs_dx, record=record)
    added = None if bias is None else bias.to(x.dtype)
    dw = db = None
    if needs_dw:
        dw = torch.zeros_like(weight, dtype=weight.dtype if alone else torch.float32)
    if needs_db and bias is not None:
        db = torch.zeros_like(bias, dtype=torch.float32)
    losses, dxs = [], []

    def run(a: Any, b: Any, gemm: str, dtype: torch.dtype, plus: Tensor | None = None) -> Tensor:
        return multiply(a, b, getattr(cells, gemm), dtype, plus, call.plans, call.records, gemm)

    for start in range(0, max(x.shape[0], 1), size):
        rows, own = x[start : start + size], target[start : start + size]
        x_row, x_col = doors.input(rows, fprop.lhs, wgrad.rhs, columnwise=needs_dw, record=record, beside=(w_row, None))
        assert x_row is not None
        x_row, own = vocabulary.gather("input", x_row, 0), vocabulary.everybody(own)
        logits = run(x_row, w_row, "fprop", x.dtype, added).to(torch.float32, copy=x.dtype == torch.float32)
        found, lse = settings.of(logits, own, vocabulary)
        losses.append(vocabulary.own(found) if settings.reduction == "none" else found)
        if record is False:
            continue
        shares = None if share is None else vocabulary.everybody(share[start : start + size])
        d = settings.gradient(logits, lse, own, shares, vocabulary)
        if db is not None:
            db += d.sum(0)
        d = d.to(x.dtype)
        d_row, d_col = doors.grad_output(
            d, dgrad.lhs, wgrad.lhs, rowwise=needs_dx, columnwise=needs_dw, record=record, beside=(w_col, x_col)
        )
        if needs_dx:
            dxs.append(vocabulary.sum("dx", run(d_row, w_col, "dgrad", x.dtype)))
        if dw is not None:
            assert x_col is not None
            x_col = vocabulary.gather("input", x_col, 1)
            dw += run(d_col, x_col, "wgrad", dw.dtype)
    dx = torch.cat(dxs) if needs_dx else None
    grads = (dx, None if dw is None else dw.to(weight.dtype), None if db is None or bias is None else db.to(bias.dtype))
    return torch.cat(losses), grads
