"""Blocks of models as entries of the sweep of DTensor: `phalanx verify dtensor --names blocks`.

The input and the parameters of each are spread in several ways, evenly and unevenly. Nothing else is said: every move
between the ops is chosen by DTensor.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, WORDS = 12, 2, 16


class Function(nn.Module):
    """A module whose forward is a function of its parts and the input.

    Args:
        function: Called with (this module, input).
        parts: Its modules and parameters by name.
    """

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The function."""
        return self.function(self, x)


def _linear(inner: int = WIDTH, outer: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(inner, outer, bias=bias)


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def _attended(m: Any, x: torch.Tensor, causal: bool = False) -> torch.Tensor:
    q, k, v = (_heads(f(x)) for f in (m.q, m.k, m.v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    made: torch.Tensor = m.o(y.transpose(1, 2).reshape(*x.shape))
    return made


def _attention() -> dict[str, Any]:
    return {"q": _linear(), "k": _linear(), "v": _linear(), "o": _linear()}


def _mlp(factor: int = 2) -> dict[str, Any]:
    return {"up": _linear(WIDTH, factor * WIDTH), "down": _linear(factor * WIDTH, WIDTH)}


def _gpt(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + _attended(m, m.norm1(x), True)
    made: torch.Tensor = x + m.down(functional.gelu(m.up(m.norm2(x)), approximate="tanh"))
    return made


def _llama(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + _attended(m, m.norm1(x), True)
    y = m.norm2(x)
    made: torch.Tensor = x + m.down(functional.silu(m.gate(y)) * m.up(y))
    return made


def _by_hand(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (_heads(f(x)) for f in (m.q, m.k, m.v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    made: torch.Tensor = m.o((scores @ v).transpose(1, 2).reshape(*x.shape))
    return made


def _linear_attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = functional.elu(m.q(x)) + 1, functional.elu(m.k(x)) + 1, m.v(x)
    made: torch.Tensor = m.o(q @ (k.transpose(1, 2) @ v) / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True))
    return made


def _experts(m: Any, x: torch.Tensor) -> torch.Tensor:
    share = m.gate(x).softmax(-1)
    made: torch.Tensor = torch.stack([functional.relu(f(x)) for f in (m.a, m.b, m.c)], -1) @ share[..., None]
    return made.squeeze(-1)


def _mixer(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + m.across(m.norm1(x).transpose(1, 2)).transpose(1, 2)
    made: torch.Tensor = x + m.down(functional.gelu(m.up(m.norm2(x))))
    return made


def _recurrent(m: Any, x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(m.gate(x))
    made: torch.Tensor = m.o(torch.cumsum(gate * m.v(x), 1) / torch.cumsum(gate, 1))
    return made


def _squeeze(m: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = x * torch.sigmoid(m.down(functional.relu(m.up(x.mean(1)))))[:, None]
    return made


def _residual(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.transpose(1, 2)
    made: torch.Tensor = functional.relu(y + m.second(functional.relu(m.first(y)))).transpose(1, 2)
    return made


def _highway(m: Any, x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(m.gate(x))
    made: torch.Tensor = gate * functional.relu(m.v(x)) + (1 - gate) * x
    return made


def _autoencoder(m: Any, x: torch.Tensor) -> torch.Tensor:
    mean, spread = m.up(x).chunk(2, -1)
    made: torch.Tensor = m.down(torch.cat([mean, spread.exp().clamp(max=3)], -1)) - x
    return made


def _crossed(m: Any, x: torch.Tensor) -> torch.Tensor:
    pairs = x @ x.transpose(1, 2)
    made: torch.Tensor = m.o(x) + pairs.tanh() @ m.v(x)
    return made


def _normed(m: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = m.o(functional.normalize(m.v(x), dim=-1)).logsumexp(-1, keepdim=True) + x
    return made


# Each makes a block for inputs of shape (batch, LENGTH, WIDTH).
LENGTH = 4
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: Function(lambda m, x: m.down(functional.gelu(m.up(x))), **_mlp(4)),
    "swiglu": lambda: Function(
        lambda m, x: m.down(functional.silu(m.gate(x)) * m.up(x)), gate=_linear(12, 24), **_mlp()
    ),
    "gpt": lambda: Function(_gpt, norm1=nn.LayerNorm(WIDTH), norm2=nn.LayerNorm(WIDTH), **_attention(), **_mlp()),
    "llama": lambda: Function(
        _llama, norm1=nn.RMSNorm(WIDTH), norm2=nn.RMSNorm(WIDTH), gate=_linear(12, 24), **_attention(), **_mlp()
    ),
    "bert": lambda: Function(lambda m, x: m.norm(x + _attended(m, x)), norm=nn.LayerNorm(WIDTH), **_attention()),
    "attention by hand": lambda: Function(_by_hand, **_attention()),
    "linear attention": lambda: Function(_linear_attention, **_attention()),
    "experts": lambda: Function(_experts, gate=_linear(WIDTH, 3), a=_linear(), b=_linear(), c=_linear()),
    "mixer": lambda: Function(
        _mixer, norm1=nn.LayerNorm(WIDTH), norm2=nn.LayerNorm(WIDTH), across=_linear(LENGTH, LENGTH), **_mlp()
    ),
    "gated sums": lambda: Function(_recurrent, gate=_linear(), v=_linear(), o=_linear()),
    "squeeze": lambda: Function(_squeeze, **_mlp()),
    "convolutions": lambda: Function(
        _residual, first=nn.Conv1d(WIDTH, WIDTH, 3, padding=1), second=nn.Conv1d(WIDTH, WIDTH, 1)
    ),
    "highway": lambda: Function(_highway, gate=_linear(), v=_linear()),
    "autoencoder": lambda: Function(_autoencoder, **_mlp()),
    "crossed": lambda: Function(_crossed, o=_linear(), v=_linear()),
    "normalized": lambda: Function(_normed, o=_linear(), v=_linear(bias=False)),
    "low rank": lambda: Function(lambda m, x: x + x @ m.a @ m.b, a=_weight(WIDTH, 3), b=_weight(3, WIDTH)),
    "group norm": lambda: Function(
        lambda m, x: m.o(functional.silu(m.norm(x.transpose(1, 2)).transpose(1, 2))),
        norm=nn.GroupNorm(3, WIDTH),
        o=_linear(),
    ),
    "bilinear": lambda: Function(
        lambda m, x: torch.einsum("bli,ijk,blj->blk", x, m.a, m.v(x)), a=_weight(12, 12, 5), v=_linear()
    ),
    "classes": lambda: Function(
        lambda m, x: -m.o(m.norm(x)).log_softmax(-1)[..., :3].sum(-1),
        norm=nn.LayerNorm(WIDTH),
        o=_linear(WIDTH, WORDS + 1),
    ),
    "tied": lambda: Function(lambda m, x: (x @ m.a.t()).softmax(-1) @ m.a, a=_weight(WORDS + 1, WIDTH)),
    "scaled": lambda: Function(
        lambda m, x: m.o(x * m.a + x.amax(-1, keepdim=True) - x.var(-1, keepdim=True)), a=_weight(1, 12), o=_linear()
    ),
}


class _Sample:
    """A sample in the form of torch's."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.input, self.args, self.kwargs = tensors[0], tuple(tensors[1:]), dict[str, Any]()
        self.output_process_fn_grad: Callable[[Any], Any] = lambda result: result
        self.broadcasts_input = False


class Block:
    """A block in the form of an entry of torch's OpInfo database: a function of the input and all parameters.

    Args:
        name: One of BLOCKS.
    """

    supports_autograd = True
    inplace_variant = None
    variant_test_name = ""
    dtypes = (torch.float32,)

    def __init__(self, name: str) -> None:
        self.name = f"block {name}"
        self._make = BLOCKS[name]
        self._module: nn.Module | None = None

    def op(self, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        """The block with these parameters."""
        assert self._module is not None
        names = [name for name, _ in self._module.named_parameters()]
        return torch.func.functional_call(self._module, dict(zip(names, parameters, strict=True)), (x,))

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> Iterator[_Sample]:
        """An input that two ranks divide, and one that they do not, each with parameters."""
        if self._module is None:
            self._module = self._make()
        for batch in (3, 4):
            tensors = [torch.randn(batch, LENGTH, WIDTH), *self._module.parameters()]
            yield _Sample([one.detach().clone().requires_grad_(requires_grad) for one in tensors])


def blocks() -> list[Block]:
    """All blocks."""
    return [Block(name) for name in BLOCKS]
