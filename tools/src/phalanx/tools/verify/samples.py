"""Samples with sizes that the OpInfo database lacks: even shards on 2, 3 and 4 ranks, and splits that line up."""

from collections.abc import Iterator
from typing import Any

import torch

Sample = tuple[Any, tuple[Any, ...], dict[str, Any]]

_ATEN: Any = torch.ops.aten


def _made(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _index(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def _views() -> Iterator[Sample]:
    shapes = (
        ((12, 6), (72,)),
        ((72,), (12, 6)),
        ((12, 6), (2, 6, 6)),
        ((12, 6), (24, 3)),
        ((8, 3, 4), (24, 4)),
        ((8, 3, 4), (8, 12)),
        ((8, 12), (8, 3, 4)),
        ((8, 12), (8, 4, 3)),
        ((1, 8, 12), (8, 12)),
        ((8, 12), (1, 96)),
        ((1, 8, 12), (96,)),
        ((1, 8), (8,)),
        ((12,), (1, 12)),
        ((1, 12), (12, 1)),
        ((6, 4), (4, 6)),
        ((12, 9), (9, 12)),
        ((7, 3), (21,)),
        ((21,), (7, 3)),
        ((2, 2, 2, 2), (4, 4)),
        ((4, 4), (2, 2, 2, 2)),
        ((4, 4), (2, 4, 2)),
        ((3, 0, 2), (3, 2, 0)),
        ((0,), (0, 4)),
        ((1, 1), (1,)),
        ((), (1, 1)),
        ((1,), ()),
        ((5, 12), (-1, 6)),
    )
    for before, after in shapes:
        yield _ATEN.view.default, (_made(*before), list(after)), {}
    for shape, sizes in (((12, 1), [12, 5]), ((12, 1), [3, 12, 5]), ((12,), [4, 12]), ((1, 12), [8, -1]), ((), [4])):
        yield _ATEN.expand.default, (_made(*shape), sizes), {}
    yield _ATEN.squeeze.dim, (_made(2, 1, 3), 1), {}
    yield _ATEN.squeeze.dims, (_made(2, 1, 4), [0, 1]), {}
    yield _ATEN.squeeze.default, (_made(2, 1, 4),), {}
    yield _ATEN.slice.Tensor, (_made(12, 8), 0, 0, 12), {}
    yield _ATEN.slice.Tensor, (_made(12, 8), 0, 2, 8, 2), {}
    yield _ATEN.select_backward.default, (_made(12), [12, 8], 1, 3), {}
    yield _ATEN.slice_backward.default, (_made(12, 3), [12, 8], 1, 2, 5, 1), {}
    yield _ATEN.repeat.default, (_made(12, 4), [2, 1, 3]), {}


def _pointwise() -> Iterator[Sample]:
    pairs = (
        ((12, 8), (12, 8)),
        ((12, 8), (8,)),
        ((12, 1), (1, 8)),
        ((12, 8), (1, 1)),
        ((2, 12, 8), (12, 1)),
        ((12,), ()),
    )
    for left, right in pairs:
        for op in (_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.maximum.default):
            yield op, (_made(*left), _made(*right)), {}
        yield _ATEN.where.self, (_made(*left) > 0, _made(*right), _made(*left)), {}
        yield _ATEN.lerp.Scalar, (_made(*left), _made(*left), 0.3), {}
    for alpha in (-2, 3):
        for op in (_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.rsub.Tensor):
            yield op, (_made(12, 8), _made(12, 8)), {"alpha": alpha}
            yield op, (_index(9, 12), _index(9, 12)), {"alpha": alpha}
    narrow = torch.tensor([250, 3, 100, 7], dtype=torch.uint8)
    for op in (_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.maximum.default):
        yield op, (narrow, narrow.flip(0)), {}
    yield _ATEN.neg.default, (narrow.to(torch.int8),), {}
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.0, -2.0] * 2)
    names = """
    ceil floor trunc round sign relu hardtanh hardsigmoid sigmoid tanh sinh asinh atan erf exp exp2 expm1 abs neg
    nan_to_num sqrt log sgn softplus elu gelu
    """
    for name in names.split():
        yield getattr(_ATEN, name).default, (special,), {}
    for name in ("maximum", "minimum", "fmax", "fmin"):
        yield getattr(_ATEN, name).default, (special, special.flip(0)), {}
        yield getattr(_ATEN, name).default, (special, _made(14)), {}
    yield _ATEN.clamp.default, (special, -1, 1), {}
    yield _ATEN.clamp.Tensor, (special, _made(14)), {}
    yield _ATEN.add.Scalar, (special, 2), {}
    yield _ATEN.rsub.Scalar, (special, 2, -1), {}
    yield _ATEN.rsub.Scalar, (special, 2, 3), {}
    yield _ATEN.where.self, (special > 0, special, special.flip(0)), {}
    yield _ATEN.masked_fill.Scalar, (special, special > 0, torch.inf), {}
    yield _ATEN.masked_fill.Scalar, (_made(12, 8), _made(12, 8) > 0, 0), {}
    yield _ATEN.masked_fill.Scalar, (_made(12, 8), _made(12, 1) > 0, 2.5), {}
    yield _ATEN.leaky_relu.default, (_made(12), 0.1), {}
    yield _ATEN.leaky_relu.default, (_made(12), -0.1), {}
    for new in (torch.float64, torch.int32, torch.bool, torch.complex64):
        yield _ATEN._to_copy.default, (_made(12) * 3,), {"dtype": new}
        yield _ATEN._to_copy.default, (_index(9, 12),), {"dtype": new}


def _reductions() -> Iterator[Sample]:
    for shape in ((12, 8), (5, 12), (12, 1), (2, 3, 4), (1,), ()):
        made = _made(*shape)
        for op in (_ATEN.sum, _ATEN.mean, _ATEN.prod, _ATEN.max, _ATEN.min, _ATEN.any, _ATEN.all):
            yield op.default, (made,), {}
        if not shape:
            continue
        for keepdim in (False, True):
            for dims in ([0], [-1], list(range(len(shape)))):
                for op in (_ATEN.sum.dim_IntList, _ATEN.mean.dim, _ATEN.amax.default, _ATEN.amin.default):
                    yield op, (made, dims, keepdim), {}
                yield _ATEN.any.dims, (made > 1, dims, keepdim), {}
                yield _ATEN.all.dims, (made > -1, dims, keepdim), {}
                for order in (0, 1, 2, 3.5, torch.inf, -torch.inf):
                    yield _ATEN.linalg_vector_norm.default, (made, order, dims, keepdim), {}
    holed = _made(12, 4)
    holed[3, 1] = torch.nan
    for op in (_ATEN.sum.dim_IntList, _ATEN.mean.dim, _ATEN.amax.default, _ATEN.amin.default, _ATEN.nansum.default):
        yield op, (holed, [0]), {}
    for dtype in (torch.uint8, torch.int32):
        yield _ATEN.amax.default, (_index(9, 5, 4).to(dtype), [0]), {}
        yield _ATEN.any.dim, (_index(2, 5, 4).to(dtype), 0), {}
        yield _ATEN.all.dim, (_index(2, 5, 4).to(dtype), 0), {}
        yield _ATEN.sum.dim_IntList, (_index(9, 5, 4).to(dtype), [0]), {}


def _products() -> Iterator[Sample]:
    yield _ATEN.mm.default, (_made(12, 8), _made(8, 4)), {}
    yield _ATEN.mm.default, (_made(5, 7), _made(7, 3)), {}
    yield _ATEN.mm.default, (_made(2, 1), _made(1, 3)), {}
    yield _ATEN.bmm.default, (_made(4, 12, 6), _made(4, 6, 8)), {}
    for bias in ((4,), (1,), (), (12, 4), (12, 1), (1, 4)):
        for beta in (1, 0, 0.5):
            yield _ATEN.addmm.default, (_made(*bias), _made(12, 8), _made(8, 4)), {"beta": beta, "alpha": 2}
        yield _ATEN.baddbmm.default, (_made(*bias), _made(2, 12, 8), _made(2, 8, 4)), {}
    yield _ATEN.addmm.default, (_made(3), _made(5, 7), _made(7, 3)), {}
    for offset in (None, _made(4)):
        yield _ATEN.linear.default, (_made(2, 12, 8), _made(4, 8), offset), {}
    yield _ATEN.linear.default, (_made(12, 8), _made(8)), {}
    yield _ATEN._cdist_forward.default, (_made(12, 3), _made(8, 3), 2.0, None), {}


def _others() -> Iterator[Sample]:
    for dim in (0, 1):
        yield _ATEN.cat.default, ([_made(12, 8), _made(12, 8), _made(12, 8)], dim), {}
        yield _ATEN.stack.default, ([_made(12, 8), _made(12, 8)], dim), {}
        yield _ATEN.split.Tensor, (_made(12, 8), 3, dim), {}
        yield _ATEN.index_select.default, (_made(12, 8), dim, _index(8, 6)), {}
        yield _ATEN.gather.default, (_made(12, 8), dim, _index(8, 12, 8)), {}
        yield _ATEN.gather.default, (_made(12, 8), dim, _index(8, 4, 4)), {}
        yield _ATEN.scatter_add.default, (_made(12, 8), dim, _index(8, 12, 8), _made(12, 8)), {}
        yield _ATEN.scatter_add.default, (_made(12, 8), dim, _index(8, 4, 4), _made(12, 8)), {}
        yield _ATEN.scatter.src, (_made(12, 8), dim, _index(8, 4, 8), _made(12, 8)), {}
        yield _ATEN.scatter.value, (_made(12, 8), dim, _index(8, 12, 8), 0), {}
        yield _ATEN._softmax.default, (_made(12, 8), dim, False), {}
        yield _ATEN.cumsum.default, (_made(12, 8), dim), {}
        yield _ATEN.sort.default, (_made(12, 8), dim), {}
        yield _ATEN.topk.default, (_made(12, 8), 3, dim), {}
        yield _ATEN.index_add.default, (_made(12, 8), dim, _index(8, 12 if dim == 0 else 8), _made(12, 8)), {}
    yield _ATEN.cat.default, ([_made(0), _made(12, 8)], 0), {}
    yield _ATEN.index.Tensor, (_made(12, 8, 4), [None, _index(8, 6)]), {}
    yield _ATEN.index.Tensor, (_made(12, 8, 4), [_index(12, 6), None, _index(4, 6)]), {}
    yield _ATEN.index.Tensor, (_made(12, 8, 4), [_index(12, 6, 1), _index(8, 4)]), {}
    yield _ATEN.embedding.default, (_made(12, 8), _index(12, 4, 6)), {}
    for scaled in (False, True):
        arguments = (_made(4, 6, 8), _index(12, 4, 6), 12, -1, scaled)
        yield _ATEN.embedding_dense_backward.default, arguments, {}
    yield _ATEN.native_layer_norm.default, (_made(4, 12, 8), [8], _made(8), _made(8), 1e-5), {}
    yield _ATEN.native_layer_norm.default, (_made(5, 8), [8], None, None, 1e-5), {}
    norm = (_made(5, 8), _made(5, 8), [8], _made(5, 1), _made(5, 1).abs(), _made(8), _made(8), [True] * 3)
    yield _ATEN.native_layer_norm_backward.default, norm, {}
    yield _ATEN.native_group_norm.default, (_made(4, 6, 8), _made(6), _made(6), 4, 6, 8, 3, 1e-5), {}
    for reduction in (0, 1, 2):
        for op, backward, more in (
            (_ATEN.mse_loss.default, _ATEN.mse_loss_backward.default, ()),
            (_ATEN.smooth_l1_loss.default, _ATEN.smooth_l1_loss_backward.default, (1.0,)),
            (_ATEN.huber_loss.default, _ATEN.huber_loss_backward.default, (1.0,)),
        ):
            for shape in ((12, 8), (5, 3), (1, 3)):
                yield op, (_made(*shape), _made(*shape), reduction, *more), {}
                gradient = _made(*shape) if reduction == 0 else _made()
                yield backward, (gradient, _made(*shape), _made(*shape), reduction, *more), {}


def _spatial() -> Iterator[Sample]:
    for transposed in (False, True):
        for groups in (1, 2):
            for offset in (_made(4), None):
                weight = _made(4, 4 // groups, 3)
                options = ([1], [1], [1], transposed, [0], groups)
                yield _ATEN.convolution.default, (_made(4, 4, 6), weight, offset, *options), {}
                for mask in ([True] * 3, [False, True, False], [True, False, True]):
                    given = (_made(4, 4, 6), _made(4, 4, 6), weight, [4], *options, mask)
                    yield _ATEN.convolution_backward.default, given, {}
    yield (
        _ATEN.convolution.default,
        (_made(5, 3, 4, 4), _made(7, 3, 3, 1), _made(7), [2, 1], [0, 0], [1, 1], False, [0, 0], 1),
        {},
    )
    yield _ATEN.avg_pool2d.default, (_made(4, 4, 4, 4), [2, 2]), {}
    yield _ATEN.max_pool2d_with_indices.default, (_made(4, 4, 4, 4), [2, 2]), {}
    yield _ATEN.upsample_nearest2d.default, (_made(4, 4, 2, 2), [4, 4]), {}
    yield _ATEN.upsample_nearest2d_backward.default, (_made(4, 4, 4, 4), [4, 4], [4, 4, 2, 2]), {}
    yield _ATEN.pixel_shuffle.default, (_made(4, 16, 4, 12), 2), {}
    yield _ATEN.pixel_unshuffle.default, (_made(4, 4, 8, 24), 2), {}
    for bias in (None, _made(8, 12), _made(4, 1, 8, 12)):
        for causal in (False, True) if bias is None else (False,):
            tensors = (_made(4, 12, 8, 4), _made(4, 12, 12, 4), _made(4, 12, 12, 4))
            named = {"attn_mask": bias, "scale": None}
            attention = _ATEN._scaled_dot_product_flash_attention_for_cpu
            yield attention.default, (*tensors, 0.0, causal), named
            out, logsumexp = attention.default(*tensors, 0.0, causal, **named)
            backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
            yield backward.default, (_made(4, 12, 8, 4), *tensors, out, logsumexp, 0.0, causal), named


def samples() -> Iterator[Sample]:
    """Calls (op, positional arguments, keyword arguments) whose dims mostly are multiples of 12."""
    torch.manual_seed(5)
    for family in (_views, _pointwise, _reductions, _products, _others, _spatial):
        yield from family()
