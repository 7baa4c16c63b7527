"""Products that no call of a module shows: every way to multiply by a whole weight, and no other use of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.models.products import GROUPS, Products, plain_attention

_X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
_W = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))
_SQUARE = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(2)))
_CONV = nn.Parameter(torch.randn(5, 4, 1, generator=torch.Generator().manual_seed(3)))
_WIDE = nn.Parameter(torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(4)))
_IMAGE = nn.Parameter(torch.randn(5, 4, 3, 2, generator=torch.Generator().manual_seed(5)))
_LINE = torch.randn(2, 4, 11, generator=torch.Generator().manual_seed(6))
_PICTURE = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(7))
_DEEP = nn.Parameter(torch.randn(2, 3, 2, 1, 2, generator=torch.Generator().manual_seed(8)))
Seen = list[tuple[str, Tensor, str]]


def _watch(run: Callable[[], object]) -> tuple[Seen, dict[str, str]]:
    seen: Seen = []
    others: dict[str, str] = {}
    weights = {"w": _W, "square": _SQUARE, "conv": _CONV, "wide": _WIDE, "image": _IMAGE}
    with Products(weights, lambda *a: seen.append(a), lambda n, op: others.setdefault(n, op)):
        run()
    return seen, others


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("run", "name", "stored"),
    [
        (lambda: F.linear(_X, _W, torch.ones(5)), "w", "out_in"),
        (lambda: F.linear(_X, _W), "w", "out_in"),
        (lambda: _X @ _W.T, "w", "out_in"),
        (lambda: torch.matmul(_X, _W.transpose(0, 1)), "w", "out_in"),
        (lambda: _W @ _X.transpose(1, 2), "w", "out_in"),
        (lambda: F.linear(_X.bfloat16(), _W.bfloat16()), "w", "out_in"),
        (lambda: _X.bfloat16() @ _W.T.contiguous().bfloat16(), "w", "out_in"),
        (lambda: _X @ _SQUARE, "square", "in_out"),
        (lambda: F.linear(_X, _SQUARE), "square", "out_in"),
        (lambda: F.conv1d(_X.transpose(1, 2), _CONV, torch.ones(5)), "conv", "conv"),
        (lambda: F.conv1d(_X.mT.bfloat16(), _CONV.bfloat16()), "conv", "conv"),
        (lambda: F.linear(_X, _CONV.squeeze(-1)), "conv", "conv"),
    ],
)
def test_rows_and_orientation_are_those_of_the_product(
    mode: Callable[[], torch.no_grad], run: Callable[[], object], name: str, stored: str
) -> None:
    with mode():
        seen, others = _watch(run)
    assert [(n, s) for n, _, s in seen] == [(name, stored)]
    torch.testing.assert_close(seen[0][1].float(), _X.reshape(-1, 4), rtol=1e-2, atol=1e-2)
    assert not others


def _unfolded(x: Tensor, kernel: tuple[int, ...], **places: object) -> Tensor:
    """Patches as torch unfolds them, one row for each place."""
    x = x if x.ndim == 4 else x[..., None, :]
    places = {
        k: v if isinstance(v, tuple) or x.shape[2] > 1 else (int(k != "padding"), v)
        for k, v in places.items()
    }
    kernel = kernel if len(kernel) == 2 else (1, *kernel)
    return F.unfold(x, kernel, **places).transpose(1, 2).flatten(0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("places", [
    {}, {"padding": 1}, {"stride": 2}, {"dilation": 2, "padding": 3}, {"stride": 3, "dilation": 2, "padding": 2},
])  # fmt: skip
def test_a_convolution_is_a_product_with_the_patch_at_each_place(
    mode: Callable[[], torch.no_grad], places: dict[str, int]
) -> None:
    for x, weight, call in ((_LINE, _WIDE, F.conv1d), (_PICTURE, _IMAGE, F.conv2d)):
        with mode():
            seen, others = _watch(lambda x=x, weight=weight, call=call: call(x, weight, **places))
        (name, rows, stored) = seen[0]
        assert (len(seen), others) == (1, {})
        assert (name, stored) == (("wide", "conv3") if x is _LINE else ("image", "conv3x2"))
        assert torch.equal(rows, _unfolded(x, tuple(weight.shape[2:]), **places))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_convolution_is_the_product_of_its_rows(mode: Callable[[], torch.no_grad]) -> None:
    """Zeros of one side more, several axes, one picture without a batch, and memory in another order."""
    for x, weight, call, places in (
        (_LINE, _WIDE, F.conv1d, {"padding": "same", "dilation": 2}),
        (_LINE, _WIDE, F.conv1d, {"padding": "valid"}),
        (_PICTURE, _IMAGE, F.conv2d, {"padding": "same"}),
        (_PICTURE, _IMAGE, F.conv2d, {"padding": (0, 2), "stride": (2, 1), "dilation": (1, 3)}),
        (_PICTURE.to(memory_format=torch.channels_last), _IMAGE, F.conv2d, {"padding": 1}),
        (_PICTURE[0], _IMAGE, F.conv2d, {}),
        (torch.randn(2, 3, 4, 3, 5), _DEEP, F.conv3d, {"padding": (1, 0, 2)}),
    ):
        seen: Seen = []
        with mode(), Products({"w": weight}, lambda *a, seen=seen: seen.append(a)):
            out = call(x, weight, **places)
        ((_, rows, _),) = seen
        with torch.no_grad():
            expected = (out if x.ndim == weight.ndim else out[None]).movedim(1, -1).flatten(0, -2)
            torch.testing.assert_close(rows @ weight.flatten(1).T, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("run", [
    lambda: torch.einsum("btd,ed->bte", _X, _W),
    lambda: torch.einsum("ed,btd->ebt", _W, _X),
])  # fmt: skip
def test_einsum_is_a_product(run: Callable[[], object]) -> None:
    with torch.no_grad():
        seen, others = _watch(run)
    assert [(n, s) for n, _, s in seen] == [("w", "out_in")]
    assert torch.equal(seen[0][1], _X.reshape(-1, 4))
    assert not others


@pytest.mark.parametrize(
    ("run", "operation"),
    [
        (lambda: F.linear(_X, _W[:3]), "mm"),
        (lambda: F.linear(_X, _W * 2), "mul"),
        (lambda: F.conv1d(_LINE.repeat(1, 2, 1), _WIDE[:4], groups=2), GROUPS),
        (lambda: F.conv_transpose1d(torch.randn(2, 5, 3), _WIDE), "convolution"),
        (lambda: _WIDE @ _WIDE.mT, "bmm"),
        (lambda: _X @ _CONV.squeeze(-1)[:4, :4], "mm"),
        (lambda: F.embedding(torch.tensor([0, 1]), _W), "embedding"),
    ],
)
def test_other_uses_are_told_by_their_operation(run: Callable[[], object], operation: str) -> None:
    with torch.no_grad():
        seen, others = _watch(run)
    assert not seen
    assert list(others.values()) == [operation]


def test_looking_at_a_weight_is_no_use_of_it() -> None:
    assert _watch(lambda: (_W.shape, _W.dtype, _W.t(), _W.view(-1), _W[0], _W.detach())) == ([], {})


def test_the_freed_memory_of_a_cast_is_not_the_weight() -> None:
    def run() -> None:
        _W.double()
        for _ in range(50):
            F.linear(_X.double(), torch.zeros(5, 4, dtype=torch.double))

    with torch.no_grad():
        assert _watch(run)[0] == []


def test_attention_multiplies_by_its_weights_one_by_one() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    seen: Seen = []
    weights = {"in": attention.in_proj_weight, "out": attention.out_proj.weight}
    with torch.no_grad(), plain_attention(), Products(weights, lambda *a: seen.append(a)):
        attention(_X, _X, _X, need_weights=False)
    assert [(n, s) for n, _, s in seen] == [("in", "out_in"), ("out", "out_in")]
    assert torch.equal(seen[0][1].reshape(3, 2, 4).transpose(0, 1), _X)
    assert torch.backends.mha.get_fastpath_enabled()
