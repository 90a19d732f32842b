"""Repairs Triton's interpreter, in which the kernels run where there is no CUDA device."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.runtime.interpreter as interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_with_index(tensor, scope) -> None:
        """Triton 3.6 turns its one-element arrays into loop bounds with int(), which NumPy 2.4 refuses."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_index
