r"""torchtitan's Llama 3 with hyper-connections, for torchtitan's trainer.

    torchrun --nproc-per-node 8 -m torchtitan.train --module jpmhc.integrations.torchtitan --config llama3_8b \
        --parallelism.tensor_parallel_degree 2

Both residual additions of a block become connections. Everything else is torchtitan's: the trainer, data, checkpoints,
FSDP2, tensor and pipeline parallelism, activation checkpointing. `add_hyper_connections` changes any configuration of a
Llama 3. The `llama3_…` functions return configurations of torchtitan's registry with this change.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.llama3 import config_registry
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from jpmhc.connections import HyperConnection, parallelize_connections, shard_connections


class HyperBlock(Llama3TransformerBlock):
    """A block of Llama 3 with n residual streams. The first block makes the streams, the last returns their mean."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3TransformerBlock.Config):
        """The settings of a block, besides those of torchtitan's block.

        Attributes:
            dim: The width of a stream.
            index: The number of the block.
            first: Whether the block is the model's first block.
            last: Whether the block is the model's last block.
            streams: The number of streams.
            mixer: A name from `MIXERS`.
            options: Other arguments of `HyperConnection`.
        """

        dim: int
        index: int
        first: bool
        last: bool
        streams: int
        mixer: str
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.first, self.last = config.first, config.last
        sizes = (config.dim, config.streams, config.mixer)
        self.attention_connection, self.ffn_connection = (
            HyperConnection(None, *sizes, index=2 * config.index + k, **config.options) for k in range(2)
        )

    def forward(self, x: Tensor, attention_masks: AttentionMasksType | None, positions: Tensor | None = None) -> Tensor:
        x = x.unsqueeze(-2) if self.first else x  # equal streams may be given once
        h, state = self.attention_connection.read(x)
        y = self.attention(self.attention_norm(h), attention_masks, positions)
        x, h, state = self.attention_connection.write_read(x, y, state, self.ffn_connection)
        y = self.feed_forward(self.ffn_norm(h))
        return self.ffn_connection.write_mean(x, y, state) if self.last else self.ffn_connection.write(x, y, state)

    def _init_self_parameters(self) -> None:
        for connection in (self.attention_connection, self.ffn_connection):
            connection.reset_parameters()


class HyperLlama3Model(Llama3Model):
    """A Llama 3 whose blocks have hyper-connections."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass

    def verify_module_protocol(self) -> None:
        """Check all modules as torchtitan does, except the connections, which the blocks initialise."""
        ours = {id(part) for one in self.modules() if isinstance(one, HyperConnection) for part in one.modules()}
        for name, module in self.named_modules():
            if id(module) not in ours and not isinstance(module, Module):
                raise RuntimeError(f"{name} ({type(module).__name__}) does not satisfy torchtitan's Module protocol")


def add_hyper_connections(
    config: Trainer.Config, streams: int = 4, mixer: str = "cayley", **options: Any
) -> Trainer.Config:
    """Add hyper-connections to the Llama 3 of a trainer's configuration, and return the configuration.

    Two other settings change, because connections need them: `spmd_backend` becomes `partial_dtensor`, and `FullAC`
    takes the place of `SelectiveAC`.

    Args:
        config: The configuration, such as `torchtitan.models.llama3.config_registry.llama3_8b()`.
        streams: The number of residual streams.
        mixer: A name from `MIXERS`.
        options: Other arguments of `HyperConnection`, such as `dynamic` and `norm`.
    """
    spec = config.model_spec
    if spec is None or not isinstance(spec.model, Llama3Model.Config):
        model = "no model" if spec is None else spec.name
        raise ValueError(f"add_hyper_connections needs the configuration of a Llama 3, but it has {model}")
    HyperConnection(None, spec.model.dim, streams, mixer, index=0, device="meta", **options)  # raises errors now
    layers = [
        HyperBlock.Config(
            **_fields_of(layer),
            dim=spec.model.dim,
            index=index,
            first=index == 0,
            last=index + 1 == len(spec.model.layers),
            streams=streams,
            mixer=mixer,
            options=options,
        )
        for index, layer in enumerate(spec.model.layers)
    ]
    model = HyperLlama3Model.Config(**{**_fields_of(spec.model), "layers": layers})
    parallelize = functools.partial(parallelize_hyper_llama, spec.parallelize_fn)
    config.parallelism.spmd_backend = "partial_dtensor"
    if isinstance(config.activation_checkpoint, SelectiveAC.Config):
        config.activation_checkpoint = FullAC.Config()
    config.model_spec = dataclasses.replace(
        spec, name=f"{spec.name}_hyper", model=model, parallelize_fn=parallelize, state_dict_adapter=None
    )
    return config


def _fields_of(config: Any) -> dict[str, Any]:
    return {one.name: getattr(config, one.name) for one in dataclasses.fields(config) if one.init}


def parallelize_hyper_llama(
    parallelize: Callable[..., nn.Module],
    model: HyperLlama3Model,
    *,
    parallel_dims: Any,
    parallelism: Any,
    ac_config: Any,
    **others: Any,
) -> nn.Module:
    """Prepare the connections for tensor parallelism and FSDP2, then call torchtitan's function for the other modules.

    Args:
        parallelize: torchtitan's function.
        model: The model, or a pipeline stage of the model.
        parallel_dims, parallelism, ac_config, others: The arguments of torchtitan's function.
    """
    if isinstance(ac_config, SelectiveAC.Config):
        raise ValueError(
            "SelectiveAC cannot recompute blocks whose coefficients FSDP gathers: choose FullAC, or no activation "
            "checkpointing"
        )
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"hyper-connections need --parallelism.spmd_backend partial_dtensor, not {parallelism.spmd_backend}"
        )
    if len(model.layers):  # a stage may have only the embedding or the output layer
        if parallel_dims.tp_enabled:
            parallelize_connections(
                model, parallel_dims.get_mesh("tp"), sequence_parallel=parallelism.enable_sequence_parallel
            )
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        shard_connections(model, sublayers=False, mesh=parallel_dims.get_mesh(names))
    return parallelize(model, parallel_dims=parallel_dims, parallelism=parallelism, ac_config=ac_config, **others)


def llama3_debugmodel() -> Trainer.Config:
    """Return the configuration of torchtitan's smallest Llama 3, with hyper-connections."""
    return add_hyper_connections(config_registry.llama3_debugmodel())


def llama3_8b() -> Trainer.Config:
    """Return the configuration of torchtitan's Llama 3 with eight billion parameters, with hyper-connections."""
    return add_hyper_connections(config_registry.llama3_8b())
