"""Small models that the tests of `diagnose` measure."""

import torch
from torch import Tensor, nn

import jpmhc


def linear_network(width: int, depth: int, seed: int = 0, noise: float = 0.3) -> tuple[nn.Module, Tensor]:
    """Return linear layers near the identity, and the matrix of their product in float64."""
    torch.manual_seed(seed)
    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    product = torch.eye(width, dtype=torch.float64)
    for layer in layers:
        with torch.no_grad():
            layer.weight.copy_(torch.eye(width) + noise * torch.randn(width, width) / width**0.5)
        product = layer.weight.detach().double() @ product
    return nn.Sequential(*layers), product


class StreamNet(nn.Module):
    """A stack of hyper-connections around MLPs, between copies of a stream and their mean."""

    def __init__(
        self, dim: int = 12, depth: int = 4, mixer: str = "cayley", spread: float = 0.5, **options: object
    ) -> None:
        super().__init__()
        blocks = [jpmhc.HyperConnection(make_mlp(dim), dim, 4, mixer, index=index, **options) for index in range(depth)]
        with torch.no_grad():
            for block in blocks:
                block.map.bias.add_(spread * torch.randn_like(block.map.bias))
        self.stack = jpmhc.HyperConnectionStack(blocks)

    def forward(self, x: Tensor) -> Tensor:
        return jpmhc.reduce_streams(self.stack(jpmhc.expand_streams(x, 4)))


class Residual(nn.Module):
    """The plain residual layer x + f(x)."""

    def __init__(self, sublayer: nn.Module) -> None:
        super().__init__()
        self.sublayer = sublayer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sublayer(x)


class TinyLanguageModel(nn.Module):
    """Token embeddings, two residual layers with attention, and a norm."""

    def __init__(self, dim: int = 16, vocabulary: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 2, 32, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm = nn.RMSNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def make_mlp(dim: int, ratio: int = 2) -> nn.Sequential:
    """Return a pre-norm MLP without a residual."""
    return nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, ratio * dim), nn.GELU(), nn.Linear(ratio * dim, dim))
