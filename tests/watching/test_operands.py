"""What a tensor is to a GEMM, as told from outside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ottava.watching.operands import autocast_dtype, edges_to, plain, repeats_a_forward, unobserved, whole


def test_autocast_casts_all_but_double() -> None:
    x = torch.ones(2, 2)
    assert autocast_dtype(x) is None
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert autocast_dtype(x.to(dtype)) == torch.bfloat16
            assert nn.functional.linear(x.to(dtype), x.to(dtype)).dtype == torch.bfloat16
        assert autocast_dtype(x.double()) is None
        assert nn.functional.linear(x.double(), x.double()).dtype == torch.float64
        assert autocast_dtype(x.to("meta")) is None


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_inside_unobserved_no_mode_no_graph_and_no_autocast_is_on() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with Counting() as mode, torch.autocast("cpu", torch.bfloat16):
        with unobserved(x):
            y = x @ x
        assert mode.operations == 0
        assert (y.dtype, y.requires_grad) == (torch.float32, False)
        x @ x
        assert mode.operations > 0


class Foreign(torch.Tensor):
    """A tensor that does as it likes."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("was read")


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.ones(2, 2, device="meta"), "meta"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.ones(2, 2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.ones(2, 2, dtype=torch.int32), "int32"),
        (torch.tensor(1.0), "single number"),
        (torch.ones(0, 2), ""),
        (torch.Tensor._make_subclass(Foreign, torch.ones(2, 2)), "Foreign"),
    ],
    ids=["meta", "sparse", "fp8", "int", "scalar", "empty", "subclass"],
)
def test_what_cannot_be_read_is_refused_with_the_reason(x: Tensor, why: str) -> None:
    numbers, said = plain(x)
    assert numbers is None
    assert why in said


def test_parameters_and_plain_subclasses_are_read() -> None:
    for x in (nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2, dtype=torch.bfloat16)):
        numbers, said = plain(x)
        assert numbers is not None
        assert not numbers.requires_grad
        assert said == ""
        assert numbers.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_told_from_the_first_pass_with_a_graph(reentrant: bool) -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def hook() -> bool:  # as deep in the stack as a hook of a module is
        return repeats_a_forward()

    def forward(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch._C._current_graph_task_id() != -1, hook()))
        return x.exp()

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=reentrant).sum().backward()
    first, again = seen
    assert first == (not reentrant, False, False)
    assert again == (True, True, not reentrant)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)], ids=str)
def test_the_gradient_of_the_whole_arrives_whatever_is_done_to_the_view(shape: tuple[int, ...], in_place: bool) -> None:
    layer, got = nn.Linear(4, 4), []
    y = layer(torch.ones(*shape))
    whole(y).register_hook(got.append)
    z = y.relu_() if in_place else y.relu()
    z.sum().backward()
    assert torch.equal(got[0].reshape(-1, 4).sum(0), layer.bias.grad)


def test_a_slice_is_not_taken_for_its_base() -> None:
    base = torch.ones(4, 4, requires_grad=True) * 2
    for view in (base[:2], base.t(), base):
        assert whole(view) is view


def test_edges_lead_to_the_target_and_nowhere_else() -> None:
    layer, shared = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True) * 1
    other = shared.exp()
    y = layer(shared)
    for target in (shared, layer.weight, layer.bias):
        assert len(list(edges_to(target, y))) == 1
    assert list(edges_to(other, y)) == []
    assert len(list(edges_to(shared, y * other))) == 2


def test_a_tied_weight_is_not_met_again_before_the_inputs() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    x = embedding(torch.tensor([1, 2])) * 1
    y = head(x)
    assert len(list(edges_to(head.weight, y, (x,)))) == 1
    assert len(list(edges_to(head.weight, y))) == 2
