"""An operator of ours is one node of a compiled graph, and costs little beside the call of its function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ottava.kernels.gate import constant_in_graph, custom_operator

OURS = ("quantize", "quantize_both", "gemm", "column_sums")


def _promised(x: Tensor, times: int) -> Tensor:
    return torch.empty_like(x)


@custom_operator("times_for_a_test(Tensor x, int times) -> Tensor", _promised)
def times_for_a_test(x: Tensor, times: int) -> Tensor:
    """What is registered; numpy, which no graph could hold."""
    return torch.tensor(x.numpy() * times)


def test_it_is_one_node_that_runs_the_function() -> None:
    """Fake kernel, schema and dispatch keep torch's contract; Dynamo looks at the name and not into the function."""
    x = torch.arange(4.0)
    torch.library.opcheck(torch.ops.ottava.times_for_a_test.default, (x, 3))
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(lambda x: torch.ops.ottava.times_for_a_test(x, 2), backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), 2 * x)
    assert seen == ["ottava.times_for_a_test"]
    assert torch.equal(times_for_a_test(x, 5), 5 * x)  # the function stays as it is


def test_a_name_is_defined_once() -> None:
    """Two functions behind one name would be chance."""
    with pytest.raises(RuntimeError, match="times_for_a_test"):
        custom_operator("times_for_a_test(Tensor x, int times) -> Tensor", _promised)


@pytest.mark.parametrize("name", OURS)
def test_ours_have_no_wrapper_around_them(name: str) -> None:
    """`torch.library.custom_op` puts ten Python calls around each; the kernel of autograd is the mark of it."""
    import ottava.nn  # noqa: F401  # defines them

    keys = torch._C._dispatch_dump(f"ottava::{name}")
    assert "CompositeExplicitAutograd" in keys
    assert "\nAutograd" not in keys


def test_a_constant_bears_torchs_own_mark() -> None:
    """Set by hand, for torch's decorator imports Dynamo; and Dynamo takes it: it runs once, while it traces."""
    ran: list[int] = []

    def ours(x: int) -> int:
        ran.append(x)
        return x + len(ran)

    def torchs() -> None: ...

    assert vars(constant_in_graph(ours)) == vars(torch.compiler.assume_constant_result(torchs)) != {}
    compiled = torch.compile(lambda x: x * ours(2), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [3.0] * 3
    assert ran == [2]
