"""Turn the residual additions of any transformer model into hyper-connections, in place."""

from jpmhc.wrap.installation import prepare_stage
from jpmhc.wrap.pretrained import load_wrapped
from jpmhc.wrap.wrapping import unwrap, wrap

__all__ = ["load_wrapped", "prepare_stage", "unwrap", "wrap"]
