"""Borrow a model: compute with it in float32 and plain operations, and leave it exactly as it was."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

SEED = 0  # of the random numbers that a model in train mode draws: the same in every run of it


@contextmanager
def borrow_model(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """Lend a function that calls the model, and restore everything afterwards.

    Inside, half-precision weights are float32, weights take no gradients, buffers are copies, every call draws the same
    random numbers, and attention is computed by its plain formula, which has forward derivatives.

    Args:
        model: Any module; it stays in the mode (eval or train) that it is in.
    """
    stores: list[dict[str, Any]] = [
        store for module in model.modules() for store in (module._parameters, module._buffers)
    ]
    originals = [(store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None]
    parameters: dict[int, Tensor] = {}  # tied weights stay tied

    def call(*args: Any, **kwargs: Any) -> Any:
        buffers: dict[int, Tensor] = {}
        for store, name, tensor in originals:
            if isinstance(tensor, nn.Parameter):
                store[name] = parameters.setdefault(id(tensor), widen_halves(tensor.detach()))
            else:
                store[name] = buffers.setdefault(id(tensor), widen_halves(tensor.detach().clone()))
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)  # noqa: NPY002 (a model may draw from it)
        return model(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(_kept_random_state())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for kind in {tensor.device.type for _, _, tensor in originals} | {"cpu"}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield call
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for store, name, tensor in originals:
                store[name] = tensor


def widen_halves(tensor: Tensor) -> Tensor:
    """Return half-precision numbers as float32, and everything else as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Restore the random numbers of torch, Python and NumPy afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
