"""A model's residual additions become hyper-connections, in place, whatever the model."""

from jpmhc.wrap.installation import prepare_stage
from jpmhc.wrap.pretrained import load_wrapped
from jpmhc.wrap.wrapping import unwrap, wrap

__all__ = ["load_wrapped", "prepare_stage", "unwrap", "wrap"]
